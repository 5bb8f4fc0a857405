"""Importance weights π_old / π_rollout: how much more likely the trainer finds a response than the engine did."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.correction.thresholds import LOG_BOUND, WeightThreshold
from megatron_dapo.algorithms.masked import masked_sum, row_means, valid
from megatron_dapo.algorithms.measured import Measured

AllReduce = Callable[[Tensor], Tensor]
"""Sum of a tensor over the ranks that share a batch."""


def importance_weights(
    log_ratio: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    level: str,
    threshold: WeightThreshold,
    *,
    batch_normalize: bool = False,
    all_reduce: AllReduce | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, Measured]]:
    """Weights per token, 0 in padding, without gradient; and their metrics, taken before normalisation.

    Level "token": r of the token. "sequence": the product of r over the sequence, on each of its tokens. Weights above
    the upper bound are truncated (TIS); with a lower bound, those outside are 0 instead (IcePop); the token stays in
    the denominators. `batch_normalize` divides by the mean weight of the batch, over tokens or over sequences; it may
    lift a weight above the bound.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"invalid rollout_is {level!r}; it must be 'token' or 'sequence'")
    logs = log_ratio if level == "token" else log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    raw = valid(logs.clamp(-LOG_BOUND, LOG_BOUND).exp(), mask)
    if threshold.lower is None:
        weights = raw.clamp(max=threshold.upper)
    else:
        weights = valid(raw, (raw >= threshold.lower) & (raw <= threshold.upper))
    metrics = _weight_metrics(weights, raw, log_ratio, mask, level, threshold)
    if batch_normalize:
        factor = _batch_mean(weights, mask, level, all_reduce)
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = Measured("mean", factor[None], mask.any()[None])
    return weights, metrics


def _batch_mean(
    weights: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], level: str, all_reduce: AllReduce | None
) -> Float[Tensor, ""]:
    """Mean weight over the tokens, or the sequences, of all ranks; 1 when it is too small to divide by."""
    if level == "token":
        parts = torch.stack([masked_sum(weights, mask), mask.sum().to(weights)])
    else:
        parts = torch.stack([row_means(weights, mask).sum(), mask.any(-1).sum().to(weights)])
    total, count = all_reduce(parts) if all_reduce is not None else parts
    mean = total / count.clamp(min=1)
    return torch.where(mean > 1e-8, mean, 1.0)


def _weight_metrics(
    weights: Float[Tensor, "b t"],
    raw: Float[Tensor, "b t"],
    log_ratio: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    level: str,
    threshold: WeightThreshold,
) -> dict[str, Measured]:
    """Fractions beyond the bounds look at the weights before truncation; mean, deviation and sample size after it.

    Per token, or at level "sequence" per row and untruncated, are the maximum, the minimum and those fractions.
    """
    lower = 1 / threshold.upper if threshold.lower is None else threshold.lower
    rows = mask.any(-1)
    if level == "token":
        extremes, beyond, counted = weights, raw, mask
    else:
        extremes = beyond = log_ratio.sum(-1).clamp(-LOG_BOUND, LOG_BOUND).exp()
        counted = rows
    bounded = weights.clamp(0, threshold.upper)
    metrics = {
        "rollout_is_mean": Measured("mean", weights, mask),
        "rollout_is_max": Measured("max", extremes, counted),
        "rollout_is_min": Measured("min", extremes, counted),
        "rollout_is_std": Measured("std", bounded, mask),
        "rollout_is_eff_sample_size": Measured("effective_share", bounded, mask),
        "rollout_is_ratio_fraction_high": Measured("mean", (beyond > threshold.upper).float(), counted),
        "rollout_is_ratio_fraction_low": Measured("mean", (beyond < lower).float(), counted),
    }
    metrics |= row_metrics("rollout_is", row_means(weights, mask), rows, centre=1.0)
    raw_rows = row_means(raw, mask)
    metrics["rollout_is_seq_fraction_high"] = Measured("mean", (raw_rows > threshold.upper).float(), rows)
    metrics["rollout_is_seq_fraction_low"] = Measured("mean", (raw_rows < lower).float(), rows)
    if threshold.lower is not None:
        outside = (raw < threshold.lower) | (raw > threshold.upper)
        metrics["rollout_is_oob_ratio"] = Measured("mean", outside.float(), mask)
    return metrics


def row_metrics(
    prefix: str, rows: Float[Tensor, " b"], there: Bool[Tensor, " b"], centre: float
) -> dict[str, Measured]:
    """How one value per sequence (that is `there`) is distributed, and how far it strays from `centre`."""
    return {
        f"{prefix}_seq_mean": Measured("mean", rows, there),
        f"{prefix}_seq_std": Measured("sample_std", rows, there),
        f"{prefix}_seq_max": Measured("max", rows, there),
        f"{prefix}_seq_min": Measured("min", rows, there),
        f"{prefix}_seq_max_deviation": Measured("max", (rows - centre).abs(), there),
    }
