"""GDPO: normalise each reward within the group before adding them up, so that none drowns another."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.advantages.base import (
    AdvantageConfig,
    Estimate,
    check_finite,
    grouped_scores,
    register_advantage,
    sequence_scores,
    spread,
)
from megatron_dapo.algorithms.advantages.grpo import group_relative
from megatron_dapo.algorithms.groups import GroupIds
from megatron_dapo.algorithms.masked import masked_whiten


@register_advantage("gdpo", needs=("group_ids", "component_rewards"))
def gdpo(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds,
    *,
    config: AdvantageConfig,
    component_rewards: Mapping[str, Float[Tensor, " b"]],
    **_: Any,
) -> Estimate:
    """Σ_k weight_k·GRPO(reward k), on every token, whitened over the batch (GDPO, arXiv:2601.05242).

    `gdpo_reward_keys` names the rewards, `gdpo_reward_weights` weighs them (all 1 if absent). A group in which every
    reward is constant stays at exactly 0 after whitening.
    """
    sequence_scores(token_rewards)
    total = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    silent = torch.ones_like(total, dtype=torch.bool)
    for key, weight in _weights(config, component_rewards).items():
        scores = component_rewards[key].to(total)
        check_finite(scores, f"rewards {key!r}")
        total += weight * group_relative(scores, mask, group_ids, config)
        group = grouped_scores(scores, mask, group_ids, config)
        silent &= group.is_constant if config.singleton == "zero" else group.is_constant & ~group.is_single
    advantages = masked_whiten(spread(total, mask, token_rewards.dtype), mask)
    advantages = torch.where(silent[:, None], 0.0, advantages)
    return advantages, advantages


def _weights(config: AdvantageConfig, given: Mapping[str, Float[Tensor, " b"]]) -> dict[str, float]:
    keys = config.gdpo_reward_keys
    if not keys:
        raise ValueError(f"gdpo needs algorithm.gdpo_reward_keys; the reward function returned {sorted(given)}")
    missing = [key for key in keys if key not in given]
    if missing:
        raise ValueError(f"gdpo_reward_keys {missing} were not returned by the reward function: it has {sorted(given)}")
    weights = config.gdpo_reward_weights or (1.0,) * len(keys)
    if len(weights) != len(keys):
        raise ValueError(f"gdpo_reward_weights has {len(weights)} entries for {len(keys)} gdpo_reward_keys")
    return dict(zip(keys, weights, strict=True))
