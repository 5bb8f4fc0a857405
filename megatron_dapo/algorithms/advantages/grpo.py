"""GRPO: a response is as good as its score relative to the other responses to the same prompt."""

from typing import Any

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


@register_advantage("grpo", "grpo_vectorized", needs=("group_ids",))
def grpo(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds,
    *,
    config: AdvantageConfig,
    **_: Any,
) -> Estimate:
    """(S - mean S) / (std S + 1e-6) within the group, on every token; std is unbiased.

    Source: GRPO (arXiv:2402.03300, §4.1.2), kept by DAPO (arXiv:2503.14476, eq. 9). With `norm_adv_by_std_in_grpo`
    false the division is left out (Dr. GRPO, arXiv:2503.20783). Returns the advantages twice.
    """
    scores = sequence_scores(token_rewards)
    advantages = spread(group_relative(scores, mask, group_ids, config), mask, token_rewards.dtype)
    return advantages, advantages


def group_relative(
    scores: Float[Tensor, " b"], mask: Bool[Tensor, "b t"], group_ids: GroupIds, config: AdvantageConfig
) -> Float[Tensor, " b"]:
    """The GRPO advantage of each row's score."""
    group = grouped_scores(scores, mask, group_ids, config)
    relative, raw = group.centred(), scores.double()
    if config.norm_adv_by_std_in_grpo:
        relative = relative / (group.std() + STD_EPSILON)
        raw = raw / (1 + STD_EPSILON)
    return apply_singleton_rule(relative, raw, group, config)
