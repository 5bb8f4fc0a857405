"""PPO with a decoupled clip range ("clip-higher") and dual clip: the loss of DAPO."""

import math

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


@register_policy_loss("vanilla")
def vanilla(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """max(-A·r, -A·clip(r, 1 - low, 1 + high)), and for A < 0 at most c·|A|; r = π/π_old.

    Sources: PPO (arXiv:1707.06347, eq. 7), dual clip (arXiv:1912.09729), decoupled range (DAPO,
    arXiv:2503.14476, eq. 10). The maximum clips only on the side where moving further would pay, so the whole formula
    is -A·r with r held in [0, 1 + high] for A ≥ 0 and in [1 - low, c] for A < 0; a token at a bound has no gradient.
    """
    mask = mask.bool()
    advantages = valid(real(advantages), mask)
    delta = log_ratio(logprob, old_logprob, mask)
    low, high, dual = _log_bounds(config)
    down = advantages < 0
    held = delta.clamp(torch.where(down, low, -LOG_RATIO_BOUND), torch.where(down, dual, high))
    loss = weighted(-advantages * held.exp(), mask, rollout_is_weights)
    with torch.no_grad():
        stopped = torch.where(down, delta < low, (delta > high) & (advantages > 0))
        metrics = {
            "actor/pg_clipfrac": masked_mean(stopped.float(), mask),
            "actor/ppo_kl": -masked_mean(delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), mask),
            "actor/pg_clipfrac_lower": masked_mean((down & (delta > dual)).float(), mask),
        }
    return loss, floats(metrics)


def _log_bounds(config: PolicyLossConfig) -> tuple[float, float, float]:
    """log of 1 - low, 1 + high and c; low ≥ 1 means no lower bound."""
    low = math.log(1 - config.low) if config.low < 1 else -LOG_RATIO_BOUND
    return low, math.log1p(config.high), min(math.log(config.clip_ratio_c), LOG_RATIO_BOUND)
