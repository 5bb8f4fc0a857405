"""Importance weights π_old / π_rollout: how much more likely the trainer finds a response than the engine did."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.correction.thresholds import LOG_BOUND, WeightThreshold
from megatron_dapo.algorithms.masked import masked_mean, masked_sum, row_means, valid

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
) -> tuple[Float[Tensor, "b t"], dict[str, Tensor]]:
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
    metrics = _weight_metrics(weights, raw, log_ratio, mask, level, threshold) if mask.any() else {}
    if batch_normalize:
        factor = _batch_mean(weights, mask, level, all_reduce)
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
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
) -> dict[str, Tensor]:
    """Fractions beyond the bounds look at the weights before truncation; mean, deviation and sample size after it.

    Per token, or at level "sequence" per row and untruncated, are the maximum, the minimum and those fractions.
    """
    lower = 1 / threshold.upper if threshold.lower is None else threshold.lower
    rows = mask.any(-1)
    if level == "token":
        extremes, beyond = weights[mask], raw[mask]
    else:
        extremes = beyond = log_ratio.sum(-1)[rows].clamp(-LOG_BOUND, LOG_BOUND).exp()
    bounded = weights.clamp(0, threshold.upper)
    mean = masked_mean(bounded, mask)
    variance = (masked_mean(bounded.square(), mask) - mean.square()).clamp(min=0)
    metrics = {
        "rollout_is_mean": masked_mean(weights, mask),
        "rollout_is_max": extremes.max(),
        "rollout_is_min": extremes.min(),
        "rollout_is_std": variance.sqrt(),
        "rollout_is_eff_sample_size": 1 / masked_mean((bounded / (mean + 1e-8)).square(), mask).clamp(min=1e-8),
        "rollout_is_ratio_fraction_high": (beyond > threshold.upper).float().mean(),
        "rollout_is_ratio_fraction_low": (beyond < lower).float().mean(),
    }
    metrics |= row_metrics("rollout_is", row_means(weights, mask)[rows], centre=1.0)
    raw_rows = row_means(raw, mask)[rows]
    metrics["rollout_is_seq_fraction_high"] = (raw_rows > threshold.upper).float().mean()
    metrics["rollout_is_seq_fraction_low"] = (raw_rows < lower).float().mean()
    if threshold.lower is not None:
        outside = (raw < threshold.lower) | (raw > threshold.upper)
        metrics["rollout_is_oob_ratio"] = masked_mean(outside.float(), mask)
    return metrics


def row_metrics(prefix: str, rows: Float[Tensor, " n"], centre: float) -> dict[str, Tensor]:
    """How one value per sequence is distributed, and how far it strays from `centre`."""
    return {
        f"{prefix}_seq_mean": rows.mean(),
        f"{prefix}_seq_std": rows.std() if len(rows) > 1 else rows.new_zeros(()),
        f"{prefix}_seq_max": rows.max(),
        f"{prefix}_seq_min": rows.min(),
        f"{prefix}_seq_max_deviation": (rows - centre).abs().max(),
    }
