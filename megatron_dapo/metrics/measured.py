"""Metrics of what other rooms measured: plain (kind, values, mask), because algorithms know nothing of metrics."""

from collections.abc import Callable, Mapping

from jaxtyping import Bool, Num
from torch import Tensor

from megatron_dapo.metrics.typed import EffectiveShare, Max, Metric, Metrics, Min, Std, masked_mean

# of the values that count; "mean" needs no list of them
KINDS: dict[str, Callable[[Tensor], Metric]] = {
    "max": lambda values: Max(values.max()),
    "min": lambda values: Min(values.min()),
    "std": Std.of,
    "sample_std": lambda values: Std.of(values, correction=1),
    "effective_share": lambda values: EffectiveShare(Std.of(values)),
}


def measured(found: Mapping[str, tuple[str, Num[Tensor, "*shape"], Bool[Tensor, "*shape"]]]) -> Metrics:
    """One metric per name from its kind, its values and where these count; nothing counts, no metric.

    Raises KeyError for an unknown kind.
    """
    metrics: Metrics = {}
    for name, (kind, values, mask) in found.items():
        if kind == "mean":
            metrics[name] = masked_mean(values, mask)
        elif (chosen := values.detach()[mask]).numel():
            metrics[name] = KINDS[kind](chosen)
    return metrics
