"""Compare two checkpoints tensor by tensor, and two models by their logits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoint_tools.megatron_files import (
    MegatronWeights,
    ensure_world,
    make_plan,
    megatron_architecture,
    sharded_state,
)
from megatron_dapo.config.model import ModelConfig, ParallelConfig
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.build import build_model
from megatron_dapo.models.hf_files import HFWeights, WeightsError
from megatron_dapo.models.megatron_config import transformer_config

Weights = HFWeights | MegatronWeights
Logits = Callable[[Tensor], Tensor]  # token ids [1, t] to logits [1, t, v]


@dataclass(frozen=True)
class Difference:
    """One tensor in both checkpoints. `largest` is max |a - b|; None where a side lacks it or the shapes differ."""

    name: str
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None
    largest: float | None


def compare(a: str | Path, b: str | Path, *, hf_dir: str | Path | None = None) -> Iterator[Difference]:
    """Every tensor of two checkpoints, each a Hugging Face directory or a Megatron distributed checkpoint.

    A Megatron checkpoint is read as HF tensors, through the network of `hf_dir` (default: the side that is a Hugging
    Face directory). Memory: one tensor of each side. Raises WeightsError when no config.json says what the network is.
    """
    sides = [Path(a), Path(b)]
    config = config_of(sides, hf_dir)
    with ExitStack() as stack:
        first, second = (_open(side, config, stack) for side in sides)
        names_a, names_b = set(first), set(second)
        for name in sorted(names_a | names_b):
            shape_a = first.shape(name) if name in names_a else None
            shape_b = second.shape(name) if name in names_b else None
            largest = None
            if shape_a == shape_b and shape_a is not None:
                largest = (_read(first, name).float() - _read(second, name).float()).abs().max().item()
            yield Difference(name, shape_a, shape_b, largest)


def compare_logits(
    a: str | Path, b: str | Path, prompts: Sequence[Sequence[int]], *, hf_dir: str | Path | None = None
) -> float:
    """Largest |difference| of a logit over prompts of token ids, both sides computing in float32.

    A Hugging Face directory is computed by `transformers`, a Megatron checkpoint by Megatron, which also loads it: this
    is the proof that the two mean the same network. `hf_dir` as in `compare`.
    """
    sides = [Path(a), Path(b)]
    config = config_of(sides, hf_dir)
    logits = [_megatron_logits(s, config) if is_megatron(s) else _hf_logits(s) for s in sides]
    with torch.no_grad():
        ids = [torch.tensor([list(prompt)]) for prompt in prompts]
        return max((logits[0](one) - logits[1](one)).abs().max().item() for one in ids)


def _hf_logits(path: Path) -> Logits:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return lambda ids: model(ids).logits


def _megatron_logits(path: Path, config: Path) -> Logits:
    arch = Architecture.from_dir(config)
    ensure_world()
    (model,) = build_model(arch, transformer_config(arch, ModelConfig(dtype="float32"), ParallelConfig()))
    model.load_state_dict(dist_checkpointing.load({"model": sharded_state(model)}, str(path))["model"])
    return lambda ids: model(ids, None, None)[..., : arch.vocab]


def is_megatron(path: Path) -> bool:
    """Whether a directory is a distributed checkpoint."""
    return (path / ".metadata").is_file()


def config_of(sides: Sequence[Path], hf_dir: str | Path | None) -> Path:
    """The Hugging Face directory that says what the network of both sides is. Raises WeightsError where none does."""
    config = Path(hf_dir) if hf_dir is not None else next((s for s in sides if (s / "config.json").is_file()), None)
    if config is None:
        raise WeightsError(
            f"neither {sides[0]} nor {sides[1]} has a config.json; name a Hugging Face directory that has one (--like)"
        )
    return config


def _open(path: Path, config: Path, stack: ExitStack) -> Weights:
    if is_megatron(path):
        return MegatronWeights(path, make_plan(megatron_architecture(config, path)))
    return stack.enter_context(HFWeights(path))


def _read(weights: Weights, name: str) -> Tensor:
    if isinstance(weights, MegatronWeights):
        return weights.read_many([name])[name]
    shape = weights.shape(name)
    return weights.read(name, (0,) * len(shape), shape)
