"""The critic's loss: squared error to the return, clipped around the value it had at rollout time."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.masked import floats, masked_mean, real, valid


def value_loss(
    values: Float[Tensor, "b t"],
    returns: Float[Tensor, "b t"],
    old_values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    cliprange: float = 0.5,
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """½·max((v - R)², (clip(v, v_old ± cliprange) - R)²) per token, 0 in padding; aggregate it like a policy loss.

    Source: PPO's clipped value objective as in arXiv:2005.12729, §3. Metrics are means over the valid tokens:
    `critic/vf_clipfrac` (tokens where the clipped error is the larger) and `critic/vpred_mean`.
    """
    if cliprange < 0:
        raise ValueError(f"cliprange_value must not be negative, got {cliprange}")
    mask = mask.bool()
    values, returns, old_values = (valid(real(x), mask) for x in (values, returns, old_values))
    free = (values - returns).square()
    held = (values.clamp(old_values - cliprange, old_values + cliprange) - returns).square()
    loss = 0.5 * torch.maximum(free, held)
    with torch.no_grad():
        metrics = {
            "critic/vf_clipfrac": masked_mean((held > free).float(), mask),
            "critic/vpred_mean": masked_mean(values, mask),
        }
    return loss, floats(metrics)
