"""Rejection: tokens or whole sequences whose trainer and rollout probabilities differ too much are masked out."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.correction.thresholds import LOG_BOUND, RejectionRule
from megatron_dapo.algorithms.correction.weights import row_metrics
from megatron_dapo.algorithms.masked import row_means, valid
from megatron_dapo.algorithms.measured import Measured


def rejection_mask(
    log_ratio: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], rules: tuple[RejectionRule, ...]
) -> tuple[Bool[Tensor, "b t"], dict[str, Measured]]:
    """What remains of the mask when every rule must keep a token; and the metrics of each rule and of all together."""
    keep = mask
    metrics: dict[str, Measured] = {}
    for rule in rules:
        statistic = _statistic(log_ratio, mask, rule)
        kept = statistic <= rule.high
        if rule.low is not None:
            kept = kept & (statistic >= rule.low)
        metrics |= _rule_metrics(statistic, mask, kept, rule)
        keep = keep & kept
    return keep, metrics | _masked_fractions("rollout_rs", mask, keep)


def _statistic(log_ratio: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], rule: RejectionRule) -> Float[Tensor, "b t"]:
    """k1, k2 or k3 at each token, or their sum, mean or maximum over the sequence at each of its tokens."""
    log_r = log_ratio.clamp(-LOG_BOUND, LOG_BOUND)
    token = {"k1": -log_r, "k2": 0.5 * log_r.square(), "k3": log_r.exp() - 1 - log_r}[rule.kind]
    token = valid(token, mask)
    if rule.level == "token":
        return token
    if rule.level == "seq_sum":
        row = token.sum(-1)
    elif rule.level == "seq_mean":
        row = row_means(token, mask)
    else:
        row = token.amax(-1)  # k2 and k3 are not negative, so the 0 in padding is never the maximum that matters
    return row[:, None].expand_as(token)


def _rule_metrics(
    statistic: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], kept: Bool[Tensor, "b t"], rule: RejectionRule
) -> dict[str, Measured]:
    """Of the statistic that the rule bounds: high is above `rule.high`, low below `rule.low`."""
    low = -torch.inf if rule.low is None else rule.low
    prefix = f"rollout_rs_{rule.name}"
    rows, there = row_means(statistic, mask), mask.any(-1)
    seen, counted = (statistic, mask) if rule.level == "token" else (rows, there)
    held = statistic.clamp(0.0 if rule.low is None else rule.low, rule.high)
    metrics = {
        f"{prefix}_mean": Measured("mean", statistic, mask),
        f"{prefix}_max": Measured("max", seen, counted),
        f"{prefix}_min": Measured("min", seen, counted),
        f"{prefix}_std": Measured("std", held, mask),
        f"{prefix}_fraction_high": Measured("mean", (seen > rule.high).float(), counted),
        f"{prefix}_fraction_low": Measured("mean", (seen < low).float(), counted),
        f"{prefix}_seq_fraction_high": Measured("mean", (rows > rule.high).float(), there),
        **_masked_fractions(prefix, mask, kept),
    }
    if rule.low is not None:
        metrics[f"{prefix}_seq_fraction_low"] = Measured("mean", (rows < low).float(), there)
    return metrics | row_metrics(prefix, rows, there, centre=0.0)


def _masked_fractions(prefix: str, mask: Bool[Tensor, "b t"], kept: Bool[Tensor, "b t"]) -> dict[str, Measured]:
    """Share of the valid tokens that were lost, and of the rows with valid tokens that lost one or more."""
    dropped = mask & ~kept
    return {
        f"{prefix}_masked_fraction": Measured("mean", dropped.float(), mask),
        f"{prefix}_seq_masked_fraction": Measured("mean", dropped.any(-1).float(), mask.any(-1)),
    }
