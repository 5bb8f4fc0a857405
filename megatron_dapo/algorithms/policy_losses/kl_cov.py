"""KL-Cov: keep the entropy by tying the tokens that would lower it most to the old policy."""

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


@register_policy_loss("kl_cov")
def kl_cov(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """-A·r, plus `ppo_kl_coef`·|log r| on the tokens of highest covariance (arXiv:2505.22617).

    The covariance is (A - mean A)·(log π - mean log π) with means over the tokens of this call; the highest
    max(1, ⌊`kl_cov_ratio`·tokens⌋) pay. Metric: `actor/ppo_kl`, the mean of |log r|.
    """
    if config.kl_cov_ratio <= 0:
        raise ValueError(f"kl_cov_ratio must be positive, got {config.kl_cov_ratio}")
    mask = mask.bool()
    advantages = valid(real(advantages), mask)
    delta = log_ratio(logprob, old_logprob, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    tokens = int(mask.sum())
    paying = torch.zeros_like(mask)
    if tokens:
        cov = torch.where(mask, token_covariance(logprob, advantages, mask), -torch.inf)
        paying.view(-1)[cov.flatten().topk(max(int(config.kl_cov_ratio * tokens), 1)).indices] = True
    loss = -advantages * delta.exp() + config.ppo_kl_coef * valid(delta.abs(), paying)
    return weighted(loss, mask, rollout_is_weights), floats({"actor/ppo_kl": masked_mean(delta.abs(), mask)})
