"""REINFORCE with importance weights: the loss of the bypass mode that does not clip."""

from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.masked import floats, masked_mean, real, valid
from megatron_dapo.algorithms.policy_losses.base import (
    PolicyLossConfig,
    log_ratio,
    register_policy_loss,
    weighted,
)


@register_policy_loss("reinforce")
def reinforce(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """-A·log π, times `rollout_is_weights` (Williams, 1992).

    Metric: `actor/ppo_kl`, the mean of log π_old - log π.
    """
    mask = mask.bool()
    loss = weighted(-valid(real(advantages), mask) * valid(real(logprob), mask), mask, rollout_is_weights)
    delta = log_ratio(logprob.detach(), old_logprob, mask)
    return loss, floats({"actor/ppo_kl": -masked_mean(delta, mask)})
