"""GRPO for pass@k: only the best response of a group is rewarded, by its margin over the second best."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.advantages.base import (
    STD_EPSILON,
    AdvantageConfig,
    Estimate,
    apply_singleton_rule,
    grouped_scores,
    register_advantage,
    sequence_scores,
    spread,
)
from megatron_dapo.algorithms.groups import GroupIds


@register_advantage("grpo_passk", needs=("group_ids",))
def grpo_passk(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds,
    *,
    config: AdvantageConfig,
    **_: Any,
) -> Estimate:
    """best - second best for the best response of the group, 0 for all others (arXiv:2503.19595).

    Divided by std + 1e-6 with `norm_adv_by_std_in_grpo`. When several share the best score the margin, and so every
    advantage of the group, is 0.
    """
    scores = sequence_scores(token_rewards)
    group = grouped_scores(scores, mask, group_ids, config)
    best = group.max(group.shifted)
    is_best = group.counted & (group.shifted == best[group.groups])
    alone = group.sum(is_best.double()) == 1
    second = group.max(torch.where(is_best, -torch.inf, group.shifted))
    margin = torch.where(alone, best - second, 0.0)[group.groups]
    relative, raw = torch.where(is_best, margin, 0.0), scores.double()
    if config.norm_adv_by_std_in_grpo:
        relative = relative / (group.std() + STD_EPSILON)
        raw = raw / (1 + STD_EPSILON)
    advantages = spread(apply_singleton_rule(relative, raw, group, config), mask, token_rewards.dtype)
    return advantages, advantages
