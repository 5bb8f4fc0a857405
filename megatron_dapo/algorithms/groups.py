"""Groups by any label: dense numbers for them, and per-group sums, extremes and statistics of one value per sample."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

GroupIds = Sequence[Hashable] | np.ndarray | Tensor
"""One label per sample: strings, integers (negative and sparse ones too), tuples; equal labels are one group."""


def dense_groups(group_ids: GroupIds, device: torch.device | str = "cpu") -> Int[Tensor, " b"]:
    """Number the groups 0, 1, 2, … in order of first appearance."""
    labels = group_ids.tolist() if isinstance(group_ids, Tensor | np.ndarray) else group_ids
    number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    return torch.from_numpy(np.fromiter(map(number.__getitem__, labels), np.int64, len(labels))).to(device)


def group_sum(values: Float[Tensor, "b *rest"], groups: Int[Tensor, " b"], count: int) -> Float[Tensor, "g *rest"]:
    """Sum of the values of each group."""
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, groups, values)


class Grouped:
    """One score per sample, seen by groups.

    Scores are taken in float64 relative to the smallest of their group. A constant group is then exactly 0 in every
    statistic, and a large common offset costs no precision. Samples that are not `counted` do not enter the statistics.
    """

    def __init__(
        self, scores: Float[Tensor, " b"], group_ids: GroupIds, counted: Bool[Tensor, " b"] | None = None
    ) -> None:
        self.groups = dense_groups(group_ids, scores.device)
        if self.groups.shape != scores.shape:
            raise ValueError(f"{len(self.groups)} group ids for {len(scores)} samples; each sample needs one")
        self.count = int(self.groups.max()) + 1 if len(scores) else 0
        counted = torch.ones_like(scores, dtype=torch.bool) if counted is None else counted
        scores = scores.double()
        self.counted = counted
        low, high = -self.max(-scores), self.max(scores)
        self.offset = torch.where(low.isfinite(), low, 0.0)
        self.shifted = scores - self.offset[self.groups]
        self.size = self.sum(counted.double())
        self.is_constant = (low >= high)[self.groups]  # also true of a group nobody of which is counted

    def max(self, values: Float[Tensor, " b"]) -> Float[Tensor, " g"]:
        """Largest counted value of each group; -inf when none is counted."""
        out = values.new_full((self.count,), -torch.inf)
        return out.scatter_reduce_(0, self.groups, torch.where(self.counted, values, -torch.inf), "amax")

    def sum(self, values: Float[Tensor, " b"]) -> Float[Tensor, " g"]:
        """Sum of the counted values of each group."""
        return group_sum(torch.where(self.counted, values, 0.0), self.groups, self.count)

    @property
    def is_single(self) -> Bool[Tensor, " b"]:
        """Whether the sample is alone in its group."""
        return (self.size <= 1)[self.groups]

    def centred(self) -> Float[Tensor, " b"]:
        """Each score minus the mean of its group."""
        mean = self.sum(self.shifted) / self.size.clamp(min=1)
        return self.shifted - mean[self.groups]

    def std(self) -> Float[Tensor, " b"]:
        """Unbiased standard deviation of the sample's group, from centred squares; 0 for a group of one."""
        variance = self.sum(self.centred().square()) / (self.size - 1).clamp(min=1)
        return variance.sqrt()[self.groups]
