"""Clip-Cov: keep the entropy by detaching a few of the tokens that would lower it most."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.masked import floats, masked_mean, real, valid
from megatron_dapo.algorithms.policy_losses.base import (
    LOG_RATIO_BOUND,
    PolicyLossConfig,
    log_ratio,
    register_policy_loss,
    token_covariance,
    weighted,
)


@register_policy_loss("clip_cov")
def clip_cov(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """PPO's clipped loss, with the loss of some high-covariance tokens set to 0 (arXiv:2505.22617).

    Candidates are the tokens that PPO does not clip and whose covariance (A - mean A)·(log π - mean log π) lies between
    `clip_cov_lb` and `clip_cov_ub`; of these max(1, ⌊`clip_cov_ratio`·tokens⌋) are drawn at random, by a generator
    seeded with `clip_cov_seed`: ranks that hold the same tokens draw the same. Means are over the tokens of this call.
    Metrics: `actor/pg_clipfrac`, the share of tokens detached, and `actor/ppo_kl`, the mean of -log r.
    """
    if config.clip_cov_ratio <= 0:
        raise ValueError(f"clip_cov_ratio must be positive, got {config.clip_cov_ratio}")
    mask = mask.bool()
    advantages = valid(real(advantages), mask)
    delta = log_ratio(logprob, old_logprob, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = delta.exp()
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1 - config.low, 1 + config.high)
    cov = token_covariance(logprob, advantages, mask)
    candidates = mask & (cov > config.clip_cov_lb) & (cov < config.clip_cov_ub) & (held <= free)
    detached = _draw(candidates, max(int(config.clip_cov_ratio * int(mask.sum())), 1), config.clip_cov_seed)
    loss = valid(torch.maximum(free, held), ~detached)
    metrics = {
        "actor/pg_clipfrac": masked_mean(detached.float(), mask),
        "actor/ppo_kl": -masked_mean(delta, mask),
    }
    return weighted(loss, mask, rollout_is_weights), floats(metrics)


def _draw(candidates: Bool[Tensor, "b t"], count: int, seed: int) -> Bool[Tensor, "b t"]:
    """`count` of the candidates, or all if they are fewer."""
    places = candidates.flatten().nonzero().flatten()
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:count]
    drawn = torch.zeros_like(candidates)
    drawn.view(-1)[places[order.to(places.device)]] = True
    return drawn
