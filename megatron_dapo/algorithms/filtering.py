"""Which groups carry a learning signal: the filter of DAPO's dynamic sampling, and the metrics it may look at."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from megatron_dapo.algorithms.groups import GroupIds, dense_groups

FILTER_METRICS = ("reward", "acc", "score", "seq_reward", "seq_final_reward")


class Scored(Protocol):
    """What the reward said of one response."""

    @property
    def reward(self) -> float: ...  # after shaping (length penalty)
    @property
    def raw(self) -> float: ...  # before shaping
    @property
    def acc(self) -> float: ...
    @property
    def extra(self) -> Mapping[str, Any]: ...


def has_signal(values: Sequence[float]) -> bool:
    """Whether a group is worth training: it has one member, or its values are not all equal.

    Equality, not a standard deviation above 0: three times 0.1 has a float deviation of 1e-17. An empty group has none.
    """
    numbers = [float(value) for value in values]
    if any(number != number for number in numbers):
        raise ValueError(f"values {numbers} of a group contain NaN; a reward function must return finite numbers")
    return len(numbers) == 1 or len(set(numbers)) > 1


def group_filter(values: Sequence[float] | np.ndarray | Tensor, group_ids: GroupIds) -> Bool[Tensor, " b"]:
    """Per sample, whether its group is kept (`has_signal`), given one value and one group label per sample.

    Source: DAPO (arXiv:2503.14476, eq. 11), 0 < number of correct answers < group size, for values of any kind.
    ValueError names the samples whose value is NaN.
    """
    numbers = torch.as_tensor(values).double()
    groups = dense_groups(group_ids, numbers.device)
    if numbers.shape != groups.shape:
        raise ValueError(f"{len(groups)} group ids for {len(numbers)} values; each sample needs one")
    if numbers.isnan().any():
        raise ValueError(f"values of samples {numbers.isnan().nonzero().flatten().tolist()} are NaN")
    if not len(numbers):
        return torch.zeros(0, dtype=torch.bool)
    count = int(groups.max()) + 1
    low = numbers.new_full((count,), torch.inf).scatter_reduce_(0, groups, numbers, "amin")
    high = numbers.new_full((count,), -torch.inf).scatter_reduce_(0, groups, numbers, "amax")
    size = torch.bincount(groups, minlength=count)
    return ((size == 1) | (low != high))[groups]


def filter_value(score: Scored, metric: str, *, final_reward: float | None = None) -> float:
    """The number that `metric` names.

    - reward, score: what the reward function returned, before any shaping and any KL. Filter on this or on acc
    - acc: whether the answer is right
    - seq_reward: after shaping. Groups of all-wrong answers of different lengths pass with it
    - seq_final_reward: after shaping and KL in the reward, given as `final_reward`
    - any other name: a field of the reward's extra info
    """
    if metric in ("reward", "score"):
        return float(score.raw)
    if metric == "acc":
        return float(score.acc)
    if metric == "seq_reward":
        return float(score.reward)
    if metric == "seq_final_reward":
        if final_reward is None:
            raise ValueError("filter metric 'seq_final_reward' needs the reward after KL, which is not computed yet")
        return float(final_reward)
    if metric not in score.extra:
        raise ValueError(
            f"filter metric {metric!r} is neither one of {list(FILTER_METRICS)} nor returned by the reward function, "
            f"whose extra fields are {sorted(score.extra)}"
        )
    return float(score.extra[metric])
