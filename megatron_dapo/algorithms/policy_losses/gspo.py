"""GSPO: one importance ratio per sequence, clipped as a whole."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.masked import floats, masked_mean, real, row_means, valid
from megatron_dapo.algorithms.policy_losses.base import (
    PolicyLossConfig,
    log_ratio,
    register_policy_loss,
    weighted,
)

_MAX_LOG_RATIO = 10.0


@register_policy_loss("gspo")
def gspo(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """PPO's clipped loss with r = exp(mean over the sequence of log π - log π_old) (GSPO-token, arXiv:2507.18071).

    The value of r is the sequence's, its gradient the token's, so tokens may have their own advantages. No dual clip.
    The paper averages over tokens, then sequences: use loss_agg_mode seq-mean-token-mean. Clip ranges are of the order
    of 1e-4. Metrics: `actor/pg_clipfrac` (tokens of clipped sequences) and `actor/ppo_kl`, the mean of -log r.
    """
    mask = mask.bool()
    advantages = valid(real(advantages), mask)
    delta = log_ratio(logprob, old_logprob, mask)
    sequence = row_means(delta.detach(), mask)[:, None]
    ratio = (delta - delta.detach() + sequence).clamp(max=_MAX_LOG_RATIO).exp()
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1 - config.low, 1 + config.high)
    metrics = {
        "actor/pg_clipfrac": masked_mean((held > free).float(), mask),
        "actor/ppo_kl": -masked_mean(delta, mask),
    }
    return weighted(torch.maximum(free, held), mask, rollout_is_weights), floats(metrics)
