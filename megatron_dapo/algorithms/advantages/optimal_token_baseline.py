"""OTB: a baseline for each token position, weighing trajectories by how much gradient they have gathered so far."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.advantages.base import (
    AdvantageConfig,
    Estimate,
    grouped_scores,
    register_advantage,
    sequence_scores,
)
from megatron_dapo.algorithms.groups import Grouped, GroupIds, group_sum
from megatron_dapo.algorithms.masked import real, valid
from megatron_dapo.algorithms.scan import reward_to_go

_NEEDS = ("group_ids", "old_logprob", "sum_pi_squared")


@register_advantage("optimal_token_baseline", needs=_NEEDS)
def optimal_token_baseline(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds,
    *,
    config: AdvantageConfig,
    old_logprob: Float[Tensor, "b t"],
    sum_pi_squared: Float[Tensor, "b t"],
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
    **_: Any,
) -> Estimate:
    """G_t - B_t, with B_t = Σ_i G_it·W_it / Σ_i W_it over the trajectories of the group that are at a valid token at t.

    G is the reward to go; W_t = Σ_{s≤t} (1 - 2π_s + Σπ²_s), times the squared importance weight if there is one, stands
    for the squared gradient norm gathered so far (Li et al., The Optimal Token Baseline, ICML 2026). Where the longest
    trajectory runs on alone it would be its own baseline and learn nothing; there the baseline is 0
    (`handle_zero_tail`). Returns are G.
    """
    group, returns = _returns(token_rewards, mask, group_ids, config)
    weight = _gradient_norm(old_logprob, sum_pi_squared, rollout_is_weights, mask)
    return _advantages(returns, weight, mask, group, config), returns


@register_advantage("tir_optimal_token_baseline", needs=_NEEDS)
def tir_optimal_token_baseline(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds,
    *,
    config: AdvantageConfig,
    old_logprob: Float[Tensor, "b t"],
    sum_pi_squared: Float[Tensor, "b t"],
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
    **_: Any,
) -> Estimate:
    """As optimal_token_baseline, with time counted in valid tokens: tool output does not shift trajectories apart."""
    group, returns = _returns(token_rewards, mask, group_ids, config)
    weight = _gradient_norm(old_logprob, sum_pi_squared, rollout_is_weights, mask)
    order = torch.argsort((~mask).byte(), dim=-1, stable=True)  # valid tokens first, in their order
    squeezed = _advantages(returns.gather(-1, order), weight.gather(-1, order), mask.gather(-1, order), group, config)
    return torch.zeros_like(returns).scatter(-1, order, squeezed), returns


def _returns(
    token_rewards: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], group_ids: GroupIds, config: AdvantageConfig
) -> tuple[Grouped, Float[Tensor, "b t"]]:
    group = grouped_scores(sequence_scores(token_rewards), mask, group_ids, config)
    return group, valid(reward_to_go(token_rewards, mask), mask)


def _gradient_norm(
    old_logprob: Float[Tensor, "b t"],
    sum_pi_squared: Float[Tensor, "b t"],
    rollout_is_weights: Float[Tensor, "b t"] | None,
    mask: Bool[Tensor, "b t"],
) -> Float[Tensor, "b t"]:
    """‖one-hot - π‖² of the logit gradient at each token, times the squared importance weight."""
    norm = 1 - 2 * valid(real(old_logprob), mask).exp() + real(sum_pi_squared)
    return valid(norm if rollout_is_weights is None else norm * real(rollout_is_weights).square(), mask)


def _advantages(
    returns: Float[Tensor, "b t"],
    weight: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group: Grouped,
    config: AdvantageConfig,
) -> Float[Tensor, "b t"]:
    gathered = valid(weight.cumsum(-1), mask & group.counted[:, None])
    total = group_sum(gathered, group.groups, group.count)
    baseline = (group_sum(returns * gathered, group.groups, group.count) / total.clamp(min=1e-8))[group.groups]
    if config.handle_zero_tail:
        baseline = torch.where(_runs_alone(mask, group), 0.0, baseline)
    advantages = torch.where(group.is_constant[:, None], 0.0, returns - baseline)
    if config.singleton == "raw":
        advantages = torch.where(group.is_single[:, None], returns, advantages)
    return valid(advantages, mask)


def _runs_alone(mask: Bool[Tensor, "b t"], group: Grouped) -> Bool[Tensor, "b t"]:
    """Positions of the single longest trajectory of a group beyond the end of the second longest."""
    length = mask.sum(-1).double()
    longest = group.max(length)
    is_longest = group.counted & (length == longest[group.groups])
    unique = (group.sum(is_longest.double()) == 1)[group.groups] & is_longest
    second = group.max(torch.where(is_longest, -torch.inf, length))[group.groups]
    position = torch.arange(mask.shape[-1], device=mask.device)
    return unique[:, None] & (position >= second[:, None])
