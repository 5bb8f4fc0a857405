"""GPG: centred scores, scaled up by the share of responses that scored nothing."""

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


@register_advantage("gpg", needs=("group_ids",))
def gpg(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds,
    *,
    config: AdvantageConfig,
    **_: Any,
) -> Estimate:
    """scale·(S - mean S) within the group, with scale = samples / samples of non-zero score (GPG, arXiv:2504.02546).

    The scale is a property of the batch given: pass the whole training batch.
    """
    scores = sequence_scores(token_rewards)
    group = grouped_scores(scores, mask, group_ids, config)
    scale = group.counted.sum() / (group.counted & (scores != 0)).sum().clamp(min=1)
    relative = apply_singleton_rule(group.centred(), scores.double(), group, config) * scale
    advantages = spread(relative, mask, token_rewards.dtype)
    return advantages, advantages
