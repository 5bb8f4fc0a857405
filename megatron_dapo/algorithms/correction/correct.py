"""Rollout correction in one call: importance weights, rejection mask and diagnostics from two sets of log-probs."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.correction.config import RolloutCorrectionConfig
from megatron_dapo.algorithms.correction.diagnostics import off_policy_metrics
from megatron_dapo.algorithms.correction.rejection import rejection_mask
from megatron_dapo.algorithms.correction.thresholds import parse_rejection, parse_weight_threshold
from megatron_dapo.algorithms.correction.weights import AllReduce, importance_weights
from megatron_dapo.algorithms.masked import real, valid
from megatron_dapo.algorithms.measured import Measured


@dataclass(frozen=True)
class RolloutCorrection:
    """`weights` multiply the loss (None without rollout_is); `mask` is what rejection leaves of the given mask."""

    weights: Float[Tensor, "b t"] | None
    mask: Bool[Tensor, "b t"]
    metrics: dict[str, Measured]


@torch.no_grad()
def rollout_correction(
    old_logprob: Float[Tensor, "b t"],
    rollout_logprob: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    rollout_rs_reference_k1: bool = False,
    all_reduce: AllReduce | None = None,
) -> RolloutCorrection:
    """Correct for sampling by the rollout engine's policy instead of π_old; r = π_old / π_rollout.

    Weights and rejection are independent: rejected tokens keep their weight and lose their place in the mask. Every
    threshold is a bound of r, or of a divergence that grows on both sides of r = 1 (see `thresholds`). Weights carry no
    gradient. `all_reduce` sums a tensor over the ranks that share the batch, for `rollout_is_batch_normalize`; without
    it the mean is local. Metrics have the prefix `rollout_corr/` and describe the valid tokens of this call.
    """
    if not old_logprob.shape == rollout_logprob.shape == mask.shape:
        shapes = [tuple(x.shape) for x in (old_logprob, rollout_logprob, mask)]
        raise ValueError(f"old_logprob, rollout_logprob and mask must have one shape, got {shapes}")
    mask = mask.bool()
    old, rollout = valid(real(old_logprob), mask), valid(real(rollout_logprob), mask)
    log_ratio = old - rollout
    weights, kept = None, mask
    metrics: dict[str, Measured] = {}
    if rollout_is is not None:
        weights, found = importance_weights(
            log_ratio,
            mask,
            rollout_is,
            parse_weight_threshold(rollout_is_threshold),
            batch_normalize=rollout_is_batch_normalize,
            all_reduce=all_reduce,
        )
        metrics |= found
    if rollout_rs is not None:
        rules = parse_rejection(rollout_rs, rollout_rs_threshold, reference_k1=rollout_rs_reference_k1)
        kept, found = rejection_mask(log_ratio, mask, rules)
        metrics |= found
    metrics |= off_policy_metrics(old, rollout, mask)
    return RolloutCorrection(weights, kept, {f"rollout_corr/{name}": found for name, found in metrics.items()})


def correct_rollout(
    config: RolloutCorrectionConfig,
    old_logprob: Float[Tensor, "b t"],
    rollout_logprob: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    all_reduce: AllReduce | None = None,
) -> RolloutCorrection:
    """`rollout_correction` with the settings of a run."""
    return rollout_correction(
        old_logprob,
        rollout_logprob,
        mask,
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
        rollout_rs_reference_k1=config.rollout_rs_reference_k1,
        all_reduce=all_reduce,
    )
