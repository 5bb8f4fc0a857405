"""The ring's slots in a vLLM worker's GPU memory, opened by trainer ranks of the same node through CUDA IPC.

Trainer and engine that share a GPU cannot meet in one NCCL group; here the trainer writes straight into memory that the
worker has allocated, also from a neighbouring GPU. Counters and checksums stay in the ring's file. # untested on GPU
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEVICE_ARGUMENT = 6  # place of the device's index in what torch needs to rebuild a tensor of another process

_exported: list[Tensor] = []  # this worker's slots, alive as long as somebody may have them open


@dataclass(frozen=True)
class ExportedSlots:
    """A worker's slots as another process can open them; the GPU is named by its UUID, as indices differ."""

    gpu: str
    arguments: tuple[Any, ...]


def export_slots(nbytes: int, device: torch.device) -> ExportedSlots:
    """Allocate this worker's slots; a second call replaces them."""
    from torch.multiprocessing.reductions import reduce_tensor

    _exported[:] = [torch.empty(nbytes, dtype=torch.uint8, device=device)]
    _, arguments = reduce_tensor(_exported[0])
    return ExportedSlots(str(torch.cuda.get_device_properties(device).uuid), arguments)


def exported_slots() -> Tensor:
    if not _exported:
        raise RuntimeError("this rollout worker has not exported slots yet: call RolloutEngine.export_slots first")
    return _exported[0]


def open_slots(exported: ExportedSlots) -> Tensor:
    """The slots of a worker, in a trainer rank. Raises RuntimeError when this process cannot see that GPU."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if exported.gpu not in seen:
        raise RuntimeError(f"GPU {exported.gpu} of a rollout worker is not visible here (CUDA_VISIBLE_DEVICES: {seen})")
    arguments = list(exported.arguments)
    arguments[DEVICE_ARGUMENT] = seen.index(exported.gpu)
    return rebuild_cuda_tensor(*arguments)


def settle(memory: Tensor) -> None:
    """Wait until everything written to GPU memory is there for other processes."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)
