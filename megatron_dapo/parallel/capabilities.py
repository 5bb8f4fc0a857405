"""What this machine can do, asked once: CUDA, Transformer Engine, the backend, and the settings that follow."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Capabilities:
    """The machine's abilities and the Megatron settings that depend on nothing else.

    backend: torch.distributed backend of every process group, "nccl" or "gloo".
    deallocate_pipeline_outputs: free a stage's output after it was sent. gloo may still be reading the buffer of an
        isend then: losses become wrong and differ between runs (Megatron-core 0.16.1, interleaved schedule).
    fusions: whether CUDA kernels for fused bias, softmax, rope and gradient accumulation exist.
    """

    cuda: bool
    transformer_engine: bool
    backend: str
    deallocate_pipeline_outputs: bool
    fusions: bool

    @property
    def device(self) -> torch.device:
        """Where this rank's parameters live: its CUDA device or the host."""
        return torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")


@cache
def capabilities() -> Capabilities:
    """The abilities of this machine; constant for the life of the process."""
    cuda = torch.cuda.is_available()
    engine = cuda and _importable_transformer_engine()
    return Capabilities(
        cuda=cuda,
        transformer_engine=engine,
        backend="nccl" if cuda else "gloo",
        deallocate_pipeline_outputs=cuda,
        fusions=engine,
    )


def _importable_transformer_engine() -> bool:
    """Transformer Engine raises RuntimeError, not ImportError, when one of its shared libraries is missing."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        return False
    return True
