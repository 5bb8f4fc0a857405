"""RLOO: each response is compared with the mean of the others."""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.advantages.base import (
    AdvantageConfig,
    Estimate,
    apply_singleton_rule,
    grouped_scores,
    register_advantage,
    sequence_scores,
    spread,
)
from megatron_dapo.algorithms.groups import GroupIds


@register_advantage("rloo", "rloo_vectorized", needs=("group_ids",))
def rloo(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds,
    *,
    config: AdvantageConfig,
    **_: Any,
) -> Estimate:
    """S_i - mean of the group's other scores = n/(n - 1)·(S_i - mean S), on every token (RLOO, arXiv:2402.14740)."""
    scores = sequence_scores(token_rewards)
    group = grouped_scores(scores, mask, group_ids, config)
    size = group.size[group.groups]
    relative = group.centred() * size / (size - 1).clamp(min=1)
    advantages = spread(apply_singleton_rule(relative, scores.double(), group, config), mask, token_rewards.dtype)
    return advantages, advantages
