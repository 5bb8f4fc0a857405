"""REINFORCE++: whitened returns, without a critic; the baseline variant centres scores within the group first."""

from typing import Any

import torch
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
from megatron_dapo.algorithms.groups import Grouped, GroupIds
from megatron_dapo.algorithms.masked import masked_whiten, valid
from megatron_dapo.algorithms.scan import reward_to_go


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds | None,
    *,
    config: AdvantageConfig,
    **_: Any,
) -> Estimate:
    """The discounted reward to go of each token, whitened over the batch (REINFORCE++, arXiv:2501.03262).

    Masked spans pass the sum on undiscounted. Returns are the rewards to go.
    """
    sequence_scores(token_rewards)
    returns = valid(reward_to_go(token_rewards, mask, config.gamma), mask)
    return masked_whiten(returns, mask), returns


@register_advantage("reinforce_plus_plus_baseline", needs=("group_ids",))
def reinforce_plus_plus_baseline(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds,
    *,
    config: AdvantageConfig,
    **_: Any,
) -> Estimate:
    """S - mean S within the group, on every token, whitened over the batch (REINFORCE++-baseline, arXiv:2501.03262).

    Whitening recentres, so a group without signal would be pushed by the batch's offset; it stays at exactly 0 instead.
    """
    scores = sequence_scores(token_rewards)
    group = grouped_scores(scores, mask, group_ids, config)
    relative = apply_singleton_rule(group.centred(), scores.double(), group, config)
    advantages = without_signal_zero(masked_whiten(spread(relative, mask, token_rewards.dtype), mask), group, config)
    return advantages, advantages


def without_signal_zero(
    advantages: Float[Tensor, "b t"], group: Grouped, config: AdvantageConfig
) -> Float[Tensor, "b t"]:
    """Whitened advantages with constant groups put back to 0, except lone samples that count by their raw score."""
    silent = group.is_constant if config.singleton == "zero" else group.is_constant & ~group.is_single
    return torch.where(silent[:, None], 0.0, advantages)
