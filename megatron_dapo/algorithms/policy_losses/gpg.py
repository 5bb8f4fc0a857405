"""GPG: plain policy gradient, no ratio and no clipping."""

from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.masked import real, valid
from megatron_dapo.algorithms.policy_losses.base import (
    PolicyLossConfig,
    register_policy_loss,
    weighted,
)


@register_policy_loss("gpg")
def gpg(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """-A·log π (Group Policy Gradient, arXiv:2504.02546); on policy, with the advantage estimator of the same name."""
    mask = mask.bool()
    return weighted(-valid(real(advantages), mask) * valid(real(logprob), mask), mask, rollout_is_weights), {}
