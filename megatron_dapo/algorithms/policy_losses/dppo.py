"""DPPO: a trust region on the divergence between the policies, not on their ratio."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.masked import floats, masked_mean, real, valid
from megatron_dapo.algorithms.policy_losses.base import (
    LOG_RATIO_BOUND,
    PolicyLossConfig,
    log_ratio,
    register_policy_loss,
    weighted,
)


@register_policy_loss("dppo_tv")
def dppo_tv(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """-A·sg(min(r, c))·log π where the token's probability has not yet moved too far in the direction of A, else 0.

    Too far: π - π_old > high for A > 0, π - π_old < -low otherwise (DPPO, arXiv:2602.04879, binary total variation).
    The clip range bounds a difference of probabilities here, so a rare token may change its ratio freely; the authors
    hold ratios at c = 20. Metrics: `actor/pg_clipfrac` (tokens left out), `actor/pg_clipfrac_lower` (ratios held at c),
    `actor/ppo_kl`, the mean of -log r.
    """
    new, old = _probabilities(logprob, old_logprob, mask)
    inside = torch.where(advantages > 0, new - old <= config.high, new - old >= -config.low)
    return _surrogate(logprob, old_logprob, advantages, mask, config, inside, rollout_is_weights)


@register_policy_loss("dppo_kl")
def dppo_kl(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """As dppo_tv, with the trust region KL(π_old ‖ π) ≤ high (A > 0) or low (else) of "this token or another one".

    A token outside the region still counts while A pulls it back towards the old policy (DPPO, arXiv:2602.04879, binary
    KL). Metrics as for dppo_tv.
    """
    new, old = _probabilities(logprob, old_logprob, mask)
    divergence = old * ((old + _TINY) / (new + _TINY)).log() + (1 - old) * ((1 - old + _TINY) / (1 - new + _TINY)).log()
    inside = torch.where(
        advantages > 0, (divergence <= config.high) | (new <= old), (divergence <= config.low) | (new >= old)
    )
    return _surrogate(logprob, old_logprob, advantages, mask, config, inside, rollout_is_weights)


_TINY = 1e-8


def _probabilities(
    logprob: Float[Tensor, "b t"], old_logprob: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    mask = mask.bool()
    return valid(real(logprob.detach()), mask).exp(), valid(real(old_logprob), mask).exp()


def _surrogate(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    inside: Bool[Tensor, "b t"],
    rollout_is_weights: Float[Tensor, "b t"] | None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    mask = mask.bool()
    delta = log_ratio(logprob.detach(), old_logprob, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = delta.exp()
    gain = valid(real(advantages), mask) * ratio.clamp(max=config.clip_ratio_c) * valid(real(logprob), mask)
    metrics = {
        "actor/pg_clipfrac": masked_mean((~inside).float(), mask),
        "actor/ppo_kl": -masked_mean(delta, mask),
        "actor/pg_clipfrac_lower": masked_mean((inside & (ratio > config.clip_ratio_c)).float(), mask),
    }
    return weighted(-valid(gain, inside), mask, rollout_is_weights), floats(metrics)
