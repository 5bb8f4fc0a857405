"""Rejection: tokens or whole sequences whose trainer and rollout probabilities differ too much are masked out."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.correction.thresholds import LOG_BOUND, RejectionRule
from megatron_dapo.algorithms.correction.weights import row_metrics
from megatron_dapo.algorithms.masked import masked_mean, row_means, valid


def rejection_mask(
    log_ratio: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], rules: tuple[RejectionRule, ...]
) -> tuple[Bool[Tensor, "b t"], dict[str, Tensor]]:
    """What remains of the mask when every rule must keep a token; and the metrics of each rule and of all together."""
    keep = mask
    metrics: dict[str, Tensor] = {}
    for rule in rules:
        statistic = _statistic(log_ratio, mask, rule)
        kept = statistic <= rule.high
        if rule.low is not None:
            kept = kept & (statistic >= rule.low)
        if mask.any():
            metrics |= _rule_metrics(statistic, mask, kept, rule)
        keep = keep & kept
    dropped = mask & ~keep
    metrics["rollout_rs_masked_fraction"] = masked_mean(dropped.float(), mask)
    metrics["rollout_rs_seq_masked_fraction"] = _share_of_rows(dropped, mask)
    return keep, metrics


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
) -> dict[str, Tensor]:
    """Of the statistic that the rule bounds: high is above `rule.high`, low below `rule.low`."""
    low = -torch.inf if rule.low is None else rule.low
    prefix = f"rollout_rs_{rule.name}"
    rows = row_means(statistic, mask)[mask.any(-1)]
    seen = statistic[mask] if rule.level == "token" else rows
    held = statistic.clamp(0.0 if rule.low is None else rule.low, rule.high)
    variance = (masked_mean(held.square(), mask) - masked_mean(held, mask).square()).clamp(min=0)
    dropped = mask & ~kept
    metrics = {
        f"{prefix}_mean": masked_mean(statistic, mask),
        f"{prefix}_max": seen.max(),
        f"{prefix}_min": seen.min(),
        f"{prefix}_std": variance.sqrt(),
        f"{prefix}_fraction_high": (seen > rule.high).float().mean(),
        f"{prefix}_fraction_low": (seen < low).float().mean(),
        f"{prefix}_seq_fraction_high": (rows > rule.high).float().mean(),
        f"{prefix}_masked_fraction": masked_mean(dropped.float(), mask),
        f"{prefix}_seq_masked_fraction": _share_of_rows(dropped, mask),
    }
    if rule.low is not None:
        metrics[f"{prefix}_seq_fraction_low"] = (rows < low).float().mean()
    return metrics | row_metrics(prefix, rows, centre=0.0)


def _share_of_rows(dropped: Bool[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Share of the rows with valid tokens that lost one or more."""
    return dropped.any(-1).sum().float() / mask.any(-1).sum().clamp(min=1)
