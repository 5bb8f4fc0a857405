"""DRO: regression towards the advantage, with a quadratic pull to the old policy instead of a clip."""

from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.masked import floats, masked_mean, real, valid
from megatron_dapo.algorithms.policy_losses.base import (
    PolicyLossConfig,
    log_ratio,
    register_policy_loss,
    weighted,
)


@register_policy_loss("dro")
def dro(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """-(A·log π - ½·β·d²) with d = log π - log π_old and β = `dro_beta` (Direct Reward Optimisation, arXiv:2405.19107).

    Metrics: `actor/ppo_kl`, the mean of -d. Raises ValueError unless `dro_beta` is set and positive.
    """
    if config.dro_beta is None or config.dro_beta <= 0:
        raise ValueError(f"policy loss 'dro' needs policy_loss.dro_beta above 0, got {config.dro_beta}")
    mask = mask.bool()
    delta = log_ratio(logprob, old_logprob, mask)
    gain = valid(real(advantages), mask) * valid(real(logprob), mask) - 0.5 * config.dro_beta * delta.square()
    return weighted(-gain, mask, rollout_is_weights), floats({"actor/ppo_kl": -masked_mean(delta, mask)})
