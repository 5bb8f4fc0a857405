"""SAPO: a smooth gate in place of the clip."""

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


@register_policy_loss("sapo")
def sapo(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """-A·sigmoid(τ·(r - 1))·4/τ, with τ = `tau_pos` for A > 0 and `tau_neg` otherwise (SAPO, arXiv:2511.20347).

    The gate has slope 1 at r = 1 and flattens on both sides, faster for negative advantages. The paper averages over
    tokens, then sequences: use loss_agg_mode seq-mean-token-mean. Metric: `actor/ppo_kl`, the mean of -log r.
    """
    mask = mask.bool()
    advantages = valid(real(advantages), mask)
    delta = log_ratio(logprob, old_logprob, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    tau = torch.where(advantages > 0, config.tau_pos, config.tau_neg)
    gate = torch.sigmoid(tau * (delta.exp() - 1)) * 4 / tau
    return weighted(-gate * advantages, mask, rollout_is_weights), floats({"actor/ppo_kl": -masked_mean(delta, mask)})
