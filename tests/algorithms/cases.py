"""Inputs shared by the algorithm tests: the small batch behind the oracle numbers, and random batches for properties."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import hypothesis.strategies as st
import torch
from torch import Tensor

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
OLD = torch.tensor([[-1, -0.5, -2, -9], [-0.3, -1.2, -9, -9], [-0.7, -0.1, -3, -0.9]])
LOGPROB = torch.tensor([[-0.8, -0.9, -1, -5], [-0.3, -3.2, -1, -1], [-0.2, -0.4, -1.5, -0.8]])
ROLLOUT = torch.tensor([[-1.1, -0.4, -2.5, -1], [-0.3, -0.2, -1, -1], [-0.6, -0.15, -1, -1]])
ADVANTAGES = torch.tensor([[1, 1, 1, 0], [-1.5, -1.5, 0, 0], [0.5, 0.5, -2, 0.5]])
WEIGHTS = torch.tensor([[1.2, 0.5, 2, 0], [1, 0.3, 0, 0], [0.8, 1.1, 0, 1]])

GROUPS = ["a", "a", "b", "b", "b", "c"]
SCORES = [1, 0, 1, 0.5, 0.25, 1]
LENGTHS = [3, 4, 2, 4, 2, 4]


def terminal_rewards(scores: list[float], lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Token rewards with each score at the last valid token, and the mask."""
    rewards, mask = torch.zeros(len(scores), width), torch.zeros(len(scores), width, dtype=torch.bool)
    for row, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        rewards[row, length - 1] = score
        mask[row, :length] = True
    return rewards, mask


def given(*strategies: st.SearchStrategy) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """hypothesis.given with a few examples, no deadline (the first tensor operation is slow) and the same ones each time."""
    few = hypothesis.settings(max_examples=16, deadline=None, derandomize=True)
    return lambda test: few(hypothesis.given(*strategies)(test))


@dataclass
class Batch:
    """Random but reproducible tensors of one shape; every row has a valid token, most have gaps and padding."""

    logprob: Tensor
    old_logprob: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    generator: torch.Generator

    def rows(self, index: Tensor | slice) -> "Batch":
        return Batch(
            self.logprob[index],
            self.old_logprob[index],
            self.advantages[index],
            self.mask[index],
            self.weights[index],
            self.generator,
        )


def random_batch(rows: int, width: int, seed: int, dtype: torch.dtype = torch.float64) -> Batch:
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, generator=g, dtype=dtype) - 0.05
    logprob = (old + 0.4 * torch.randn(rows, width, generator=g, dtype=dtype)).clamp(max=-0.01)
    advantages = torch.randn(rows, width, generator=g, dtype=dtype)
    length = torch.randint(1, width + 1, (rows, 1), generator=g)
    mask = (torch.arange(width) < length) & (torch.rand(rows, width, generator=g) < 0.8)
    mask[:, 0] = True
    weights = torch.rand(rows, width, generator=g, dtype=dtype) + 0.5
    return Batch(logprob, old, advantages, mask, weights, g)


def batches(min_rows: int = 1, max_rows: int = 6, dtype: torch.dtype = torch.float64) -> st.SearchStrategy[Batch]:
    return st.builds(
        random_batch,
        rows=st.integers(min_rows, max_rows),
        width=st.integers(1, 9),
        seed=st.integers(0, 2**31),
        dtype=st.just(dtype),
    )


def garbage_like(x: Tensor, columns: int) -> Tensor:
    """NaN, inf and -inf in turn, as wide as wished: what padding may hold."""
    kinds = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=x.dtype)
    return kinds[torch.arange(columns) % 3].expand(len(x), columns)


def padded(x: Tensor, columns: int) -> Tensor:
    """`x` with columns of padding behind it: garbage, or False for a mask."""
    extra = torch.zeros(len(x), columns, dtype=torch.bool) if x.dtype == torch.bool else garbage_like(x, columns)
    return torch.cat([x, extra], dim=1)
