"""CISPO: clip the importance weight, never the gradient."""

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


@register_policy_loss("cispo")
def cispo(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """-A·sg(clip(r, 1 - low, 1 + high))·log π; every token keeps a gradient (MiniMax-M1, arXiv:2506.13585).

    Metrics: `actor/pg_clipfrac`, tokens whose weight is clipped, and `actor/ppo_kl`, the mean of -log r.
    """
    mask = mask.bool()
    delta = log_ratio(logprob.detach(), old_logprob, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = delta.exp()
    weight = ratio.clamp(1 - config.low, 1 + config.high)
    loss = weighted(-valid(real(advantages), mask) * weight * valid(real(logprob), mask), mask, rollout_is_weights)
    metrics = {
        "actor/pg_clipfrac": masked_mean((weight != ratio).float(), mask),
        "actor/ppo_kl": -masked_mean(delta, mask),
    }
    return loss, floats(metrics)
