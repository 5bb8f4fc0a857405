"""OPO: the baseline is the mean score weighted by length, which minimises the gradient's variance on policy."""

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


@register_advantage("opo", needs=("group_ids",))
def opo(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds,
    *,
    config: AdvantageConfig,
    **_: Any,
) -> Estimate:
    """S_i - Σ_j len_j·S_j / Σ_j len_j within the group, on every token; len is the number of valid tokens.

    Source: On-Policy RL with Optimal reward baseline, arXiv:2505.23585.
    """
    scores = sequence_scores(token_rewards)
    group = grouped_scores(scores, mask, group_ids, config)
    length = mask.sum(-1).double()
    baseline = group.sum(length * group.shifted) / group.sum(length).clamp(min=1)
    relative = group.shifted - baseline[group.groups]
    advantages = spread(apply_singleton_rule(relative, scores.double(), group, config), mask, token_rewards.dtype)
    return advantages, advantages
