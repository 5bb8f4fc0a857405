"""GMPO: the geometric mean of clipped token ratios, one term per sequence."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.masked import floats, masked_mean, real, row_means, valid
from megatron_dapo.algorithms.policy_losses.base import (
    PolicyLossConfig,
    log_ratio,
    register_policy_loss,
)


@register_policy_loss("geo_mean")
def geo_mean(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """-mean_t(A)·exp(mean_t clipped log r) per sequence, on its tokens (GMPO, arXiv:2507.20673).

    Log-ratios are clipped on one side, at high for A > 0 and at -low for A < 0, both in log space. Importance weights
    enter as their geometric mean over the sequence. With loss_agg_mode seq-mean-token-mean each sequence counts once,
    as in the paper. Metrics: `actor/pg_clipfrac` and `actor/pg_clipfrac_lower` (tokens with A > 0, and with A < 0,
    whose log-ratio lies outside [-low, high]), `actor/ppo_kl`, the mean of -log r.
    """
    mask = mask.bool()
    advantages = valid(real(advantages), mask)
    delta = log_ratio(logprob, old_logprob, mask)
    up, down = advantages > 0, advantages < 0
    clipped = torch.where(up, delta.clamp(max=config.high), torch.where(down, delta.clamp(min=-config.low), 0.0))
    ratio = row_means(clipped, mask).exp()
    if rollout_is_weights is not None:
        ratio = ratio * row_means(valid(rollout_is_weights.detach(), mask).clamp(min=1e-10).log(), mask).exp()
    loss = (-row_means(advantages, mask) * ratio)[:, None].expand_as(delta)
    outside = (delta > config.high) | (delta < -config.low)
    metrics = {
        "actor/pg_clipfrac": masked_mean((up & outside).float(), mask),
        "actor/ppo_kl": -masked_mean(delta, mask),
        "actor/pg_clipfrac_lower": masked_mean((down & outside).float(), mask),
    }
    return valid(loss, mask), floats(metrics)
