"""The grammar of rollout-correction thresholds, and what each one bounds.

r is the ratio π_old / π_rollout of a token or a sequence throughout.

Importance weights: "u" or a number truncates weights above u; "lo_hi" sets weights outside [lo, hi] to 0 (IcePop).
Rejection by k1 (-log r): "lo_hi" keeps lo ≤ r ≤ hi, a single u keeps 1/u ≤ r ≤ u. Rejection by k2 (½·log² r) and
k3 (r - 1 - log r): a single bound u keeps values ≤ u, on both sides of r = 1.
"""

import math
from dataclasses import dataclass

LOG_BOUND = 20.0
"""Logarithms of ratios are held within ±20 before they are exponentiated."""

REJECTION_OPTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


@dataclass(frozen=True)
class WeightThreshold:
    """Upper bound of importance weights; with a lower bound too, weights outside are zeroed rather than truncated."""

    upper: float
    lower: float | None = None


@dataclass(frozen=True)
class RejectionRule:
    """Keep where low ≤ statistic ≤ high. The statistic is k1, k2 or k3, per token or over the sequence."""

    name: str
    level: str  # token, seq_sum, seq_mean or seq_max
    kind: str  # k1, k2 or k3
    low: float | None
    high: float


def parse_weight_threshold(threshold: float | str) -> WeightThreshold:
    """`rollout_is_threshold` → bounds. ValueError or TypeError says what is wrong with it."""
    if isinstance(threshold, bool) or not isinstance(threshold, int | float | str):
        raise TypeError(f"rollout_is_threshold must be a number, or a string such as '0.5_5.0', got {threshold!r}")
    lower_text, separator, upper_text = str(threshold).partition("_")
    if not separator:
        return WeightThreshold(_positive(lower_text, "rollout_is_threshold upper bound"))
    lower = _positive(lower_text, "rollout_is_threshold lower bound")
    upper = _positive(upper_text, "rollout_is_threshold upper bound")
    if lower > upper:
        raise ValueError(f"rollout_is_threshold {threshold!r}: the lower bound exceeds the upper bound")
    return WeightThreshold(upper, lower)


def parse_rejection(
    options: str, thresholds: float | str | None, *, reference_k1: bool = False
) -> tuple[RejectionRule, ...]:
    """`rollout_rs` and `rollout_rs_threshold`, comma-separated, → rules. One threshold may serve all options.

    `reference_k1` reads the k1 thresholds as verl does: as bounds of 1/r, since k1 is -log r. "0.5_2.0" means the same
    both ways, "0.1_1.2" does not.
    """
    names = list(dict.fromkeys(part.strip() for part in options.split(",") if part.strip()))
    unknown = [name for name in names if name not in REJECTION_OPTIONS]
    if unknown or not names:
        raise ValueError(f"invalid rollout_rs option {unknown or options!r}; it must be of {list(REJECTION_OPTIONS)}")
    if thresholds is None:
        raise ValueError(f"rollout_rs={options!r} needs rollout_rs_threshold")
    if isinstance(thresholds, bool) or not isinstance(thresholds, int | float | str):
        raise TypeError(f"rollout_rs_threshold must be a number or a string, got {thresholds!r}")
    bounds = [part.strip() for part in str(thresholds).split(",") if part.strip()]
    if len(bounds) not in (1, len(names)) or not bounds:
        raise ValueError(f"rollout_rs_threshold {thresholds!r} has {len(bounds)} entries; give 1 or {len(names)}")
    if len(bounds) == 1:
        bounds = bounds * len(names)
    return tuple(_rule(name, bound, reference_k1) for name, bound in zip(names, bounds, strict=True))


def _rule(name: str, bound: str, reference_k1: bool) -> RejectionRule:
    level, _, kind = name.rpartition("_")
    what = f"rollout_rs_threshold for {name}"
    if kind != "k1":
        if "_" in bound:
            raise ValueError(f"{what} must be a single upper bound, got {bound!r}")
        return RejectionRule(name, level, kind, None, _positive(bound, what))
    lower_text, separator, upper_text = bound.partition("_")
    if separator:
        lower, upper = _positive(lower_text, f"{what}, lower bound"), _positive(upper_text, f"{what}, upper bound")
    else:
        upper = _positive(lower_text, what)
        lower = 1 / upper
    if lower > upper:
        raise ValueError(f"{what}: the lower bound of {bound!r} exceeds the upper bound")
    if reference_k1:
        return RejectionRule(name, level, "k1", math.log(lower), math.log(upper))
    return RejectionRule(name, level, "k1", -math.log(upper), -math.log(lower))


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{what} must be a number, got {text!r}") from None
    if not value > 0 or math.isinf(value):
        raise ValueError(f"{what} must be positive and finite, got {text!r}")
    return value
