"""ReMax: the baseline is the score of the greedy response to the same prompt."""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.advantages.base import (
    AdvantageConfig,
    Estimate,
    check_finite,
    register_advantage,
    sequence_scores,
)
from megatron_dapo.algorithms.groups import GroupIds
from megatron_dapo.algorithms.masked import real, valid
from megatron_dapo.algorithms.scan import reward_to_go


@register_advantage("remax", needs=("reward_baselines",))
def remax(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds | None,
    *,
    config: AdvantageConfig,
    reward_baselines: Float[Tensor, " b"],
    **_: Any,
) -> Estimate:
    """The undiscounted reward to go of each token minus the row's baseline (ReMax, arXiv:2310.10505).

    Returns are the rewards to go.
    """
    sequence_scores(token_rewards)
    check_finite(reward_baselines, "reward baselines")
    returns = valid(reward_to_go(token_rewards, mask), mask)
    return valid(returns - real(reward_baselines)[:, None], mask), returns
