"""Compare two checkpoints tensor by tensor, and two models by their logits."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoint_tools.megatron_files import MegatronWeights, make_plan
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.hf_files import HFWeights

Weights = HFWeights | MegatronWeights


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
    Face directory). Memory: one tensor of each side. Raises ValueError when no config.json says what the network is.
    """
    sides = [Path(a), Path(b)]
    config = Path(hf_dir) if hf_dir is not None else next((s for s in sides if (s / "config.json").is_file()), None)
    if config is None:
        raise ValueError(f"neither {a} nor {b} has a config.json; name a Hugging Face directory with one (hf_dir)")
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


def compare_logits(a: str | Path, b: str | Path, prompts: Sequence[Sequence[int]]) -> float:
    """Largest |difference| of a logit of two Hugging Face directories over prompts of token ids, in float32."""
    models = [AutoModelForCausalLM.from_pretrained(side, dtype=torch.float32).eval() for side in (a, b)]
    with torch.no_grad():
        return max(
            (models[0](ids).logits - models[1](ids).logits).abs().max().item()
            for ids in (torch.tensor([list(prompt)]) for prompt in prompts)
        )


def _open(path: Path, config: Path, stack: ExitStack) -> Weights:
    if (path / ".metadata").is_file():
        return MegatronWeights(path, make_plan(Architecture.from_dir(config)))
    return stack.enter_context(HFWeights(path))


def _read(weights: Weights, name: str) -> Tensor:
    if isinstance(weights, MegatronWeights):
        return weights.read_many([name])[name]
    shape = weights.shape(name)
    return weights.read(name, (0,) * len(shape), shape)
