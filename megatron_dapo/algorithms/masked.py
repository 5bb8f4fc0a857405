"""Sums, means and whitening over the valid positions of a batch: what sits in padding, even NaN, cannot leak out."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def real(x: Tensor) -> Tensor:
    """At least float32: half precision and integers are widened, float64 is left as it is."""
    return x if x.dtype == torch.float64 else x.float()


def valid(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], fill: float = 0.0) -> Float[Tensor, "*shape"]:
    """`x` where the mask is set and `fill` elsewhere.

    Multiplying by the mask would not do: 0·NaN is NaN, in the value and in the gradient.
    """
    return torch.where(mask, x, fill)


def masked_sum(x: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Sum over the valid positions."""
    return valid(x, mask).sum()


def masked_mean(x: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Mean over the valid positions; 0 when there are none."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def row_means(x: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, " b"]:
    """Mean over the valid positions of each row; 0 for a row without any."""
    return valid(x, mask).sum(-1) / mask.sum(-1).clamp(min=1)


def masked_whiten(x: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """(x - mean) / sqrt(var + 1e-8) over the valid positions, with the unbiased variance; padding becomes 0.

    Raises ValueError when fewer than two positions are valid, because the variance does not exist then.
    """
    count = int(mask.sum())
    if count < 2:
        raise ValueError(
            f"whitening needs at least two valid tokens, the mask has {count}; use a larger batch or an estimator that "
            "does not whiten (grpo, rloo, opo)"
        )
    centred = valid(x - masked_mean(x, mask), mask)
    variance = centred.square().sum() / (count - 1)
    return centred * torch.rsqrt(variance + 1e-8)


def floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Scalars as Python floats, fetched from the device in one transfer."""
    if not metrics:
        return {}
    return dict(zip(metrics, torch.stack([m.detach().double() for m in metrics.values()]).tolist(), strict=True))
