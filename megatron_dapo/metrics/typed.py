"""A metric carries its own reduction, so merging micro-batches, ranks and updates is exact and no rule reads its name.

    metrics = {"actor/pg_loss": Mean(total, tokens), "perf/max_memory_allocated_gb": Max(61.2), "actor/lr": Last(1e-6)}
    merged = merge(metrics, metrics_of_the_other_rank)
    compute(merged)  # {"actor/pg_loss": 0.031, ...} plain floats, for the trackers

Values may be Python numbers or 0-d tensors; tensors stay on their device until `settle` fetches them all in one copy.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import torch
from jaxtyping import Bool, Num
from torch import Tensor

Number = float | Tensor
SUM_BLOCK = 1 << 14


@dataclass(frozen=True)
class Sum:
    """Adds up: counts, seconds, bytes."""

    value: Number

    def merge(self, other: Self) -> Self:
        return replace(self, value=self.value + other.value)

    def compute(self) -> dict[str, float]:
        return {"": float(self.value)}


@dataclass(frozen=True)
class Mean:
    """A weighted mean, `total / weight`; the weight is tokens, sequences or groups, whatever the mean is taken over.

    A weight of zero means that nothing was seen: `compute` then gives no value.
    """

    total: Number
    weight: Number

    def merge(self, other: Self) -> Self:
        return replace(self, total=self.total + other.total, weight=self.weight + other.weight)

    def compute(self) -> dict[str, float]:
        weight = float(self.weight)
        return {} if weight == 0 else {"": float(self.total) / weight}


@dataclass(frozen=True)
class Max:
    """The largest value; NaN wins, because a NaN in one micro-batch must not vanish in the next."""

    value: Number

    def merge(self, other: Self) -> Self:
        return replace(self, value=_extreme(self.value, other.value, largest=True))

    def compute(self) -> dict[str, float]:
        return {"": float(self.value)}


@dataclass(frozen=True)
class Min:
    """The smallest value; NaN wins."""

    value: Number

    def merge(self, other: Self) -> Self:
        return replace(self, value=_extreme(self.value, other.value, largest=False))

    def compute(self) -> dict[str, float]:
        return {"": float(self.value)}


@dataclass(frozen=True)
class Last:
    """The newest value (a learning rate, a step number): the larger `order` wins, and on a tie the right operand."""

    value: Number
    order: int = 0

    def merge(self, other: Self) -> Self:
        return other if other.order >= self.order else self

    def compute(self) -> dict[str, float]:
        return {"": float(self.value)}


@dataclass(frozen=True)
class Std:
    """Standard deviation from count, mean and squared deviations (Chan et al. 1979: merges exactly).

    Of a population, or with `correction` 1 of a sample, where that of a single value is 0.
    """

    count: Number
    mean: Number
    m2: Number
    correction: int = 0

    @classmethod
    def of(cls, values: Num[Tensor, "..."], correction: int = 0) -> Self:
        """From any values; an empty tensor gives an empty metric."""
        flat = values.detach().double().flatten()
        if flat.numel() == 0:
            return cls(0.0, 0.0, 0.0, correction)
        mean = flat.mean()
        return cls(float(flat.numel()), mean, (flat - mean).square().sum(), correction)

    def merge(self, other: Self) -> Self:
        count = self.count + other.count
        share = other.count / count if count else 0.0
        delta = other.mean - self.mean
        return replace(
            self,
            count=count,
            mean=self.mean + delta * share,
            m2=self.m2 + other.m2 + delta * delta * self.count * share,
        )

    def variance(self) -> float:
        return float(self.m2) / max(1.0, float(self.count) - self.correction)

    def compute(self) -> dict[str, float]:
        return {"": math.sqrt(self.variance())} if self.count else {}


@dataclass(frozen=True)
class EffectiveShare:
    """Effective sample size of importance weights over their number: (Σw)² / (n·Σw²), 1 when all are equal."""

    weights: Std

    def merge(self, other: Self) -> Self:
        return replace(self, weights=self.weights.merge(other.weights))

    def compute(self) -> dict[str, float]:
        square = float(self.weights.mean) ** 2
        power = square + self.weights.variance()
        return {"": square / power} if power > 0 else {}


@dataclass(frozen=True)
class ExplainedVariance:
    """`1 - var(target - prediction) / (var(target) + 1e-5)` with unbiased variances, from two mergeable moments."""

    residual: Std
    target: Std

    def merge(self, other: Self) -> Self:
        return replace(self, residual=self.residual.merge(other.residual), target=self.target.merge(other.target))

    def compute(self) -> dict[str, float]:
        freedom = float(self.target.count) - 1
        if freedom < 1:
            return {}
        return {"": 1 - (float(self.residual.m2) / freedom) / (float(self.target.m2) / freedom + 1e-5)}


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation of pairs, from the moments of both sides and the sum of the products of their deviations.

    Merges exactly, as `Std` does. Without any spread on one side there is no correlation, and no value.
    """

    x: Std
    y: Std
    cross: Number

    @classmethod
    def of(cls, x: Num[Tensor, "n"], y: Num[Tensor, "n"]) -> Self:
        """From pairs; no pairs give an empty metric."""
        a, b = Std.of(x), Std.of(y)
        return cls(a, b, ((x.detach().double() - a.mean) * (y.detach().double() - b.mean)).sum())

    def merge(self, other: Self) -> Self:
        x, y = self.x.merge(other.x), self.y.merge(other.y)
        both = self.x.count * other.x.count / x.count if x.count else 0.0
        apart = (other.x.mean - self.x.mean) * (other.y.mean - self.y.mean)
        return replace(self, x=x, y=y, cross=self.cross + other.cross + apart * both)

    def compute(self) -> dict[str, float]:
        spread = math.sqrt(float(self.x.m2)) * math.sqrt(float(self.y.m2))
        return {"": float(self.cross) / spread} if spread > 0 else {}


@dataclass(frozen=True)
class PerLayer:
    """A mean per layer; published as `/layer_{i}`, and `/max` and `/avg` over layers."""

    totals: tuple[float, ...]
    weight: float

    def merge(self, other: Self) -> Self:
        totals = tuple(a + b for a, b in zip(self.totals, other.totals, strict=True))
        return replace(self, totals=totals, weight=self.weight + other.weight)

    def compute(self) -> dict[str, float]:
        if not self.weight or not self.totals:
            return {}
        means = [total / self.weight for total in self.totals]
        layers = {f"/layer_{i}": mean for i, mean in enumerate(means)}
        return layers | {"/max": max(means), "/avg": sum(means) / len(means)}


@dataclass(frozen=True)
class Histogram:
    """Counts between fixed edges; published as the quantiles `/p10 /p50 /p90 /p99`, linear within a bin."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def of(cls, values: Num[Tensor, "..."], edges: tuple[float, ...]) -> Self:
        """Counts `values` into the bins `edges`; values outside land in the first or last bin."""
        if len(edges) < 2 or any(a >= b for a, b in pairwise(edges)):
            raise ValueError(f"Histogram edges must increase and be at least two, got {edges}")
        inner = torch.tensor(edges[1:-1], dtype=torch.float64)
        bins = torch.bucketize(values.detach().double().cpu().flatten(), inner, right=True)
        return cls(edges, tuple(torch.bincount(bins, minlength=len(edges) - 1).double().tolist()))

    def merge(self, other: Self) -> Self:
        if self.edges != other.edges:
            raise ValueError(f"Histograms with different edges cannot be merged: {self.edges} and {other.edges}")
        return replace(self, counts=tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def quantile(self, q: float) -> float:
        target, seen = q * sum(self.counts), 0.0
        for (low, high), count in zip(pairwise(self.edges), self.counts, strict=True):
            if count and seen + count >= target:
                return low + (high - low) * (target - seen) / count
            seen += count
        return self.edges[-1]

    def compute(self) -> dict[str, float]:
        if not sum(self.counts):
            return {}
        return {f"/p{q}": self.quantile(q / 100) for q in (10, 50, 90, 99)}


Metric = Sum | Mean | Max | Min | Last | Std | EffectiveShare | ExplainedVariance | Correlation | PerLayer | Histogram
Metrics = dict[str, Metric]


def merge(a: Mapping[str, Metric], b: Mapping[str, Metric]) -> Metrics:
    """All metrics of both; a name that both have is reduced by its own kind. `a` is the earlier one (for `Last`)."""
    merged = dict(a)
    for name, metric in b.items():
        if name not in merged:
            merged[name] = metric
        elif type(merged[name]) is not type(metric):
            kinds = f"{type(merged[name]).__name__} and {type(metric).__name__}"
            raise TypeError(f"metric {name!r} comes as {kinds}; one name has one kind of reduction")
        else:
            merged[name] = merged[name].merge(metric)  # type: ignore[arg-type]
    return merged


def reduce(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """`merge` over any number of parts, in order; no parts give no metrics."""
    merged: Metrics = {}
    for part in parts:
        merged = merge(merged, part)
    return merged


def compute(metrics: Mapping[str, Metric | float]) -> dict[str, float]:
    """Plain floats for the trackers. A metric that saw nothing gives no key: never NaN for "empty".

    A plain number among them is a value already computed (what `MoELoadAccumulator` adds) and passes as it is.
    """
    values = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    typed = {name: metric for name, metric in metrics.items() if not isinstance(metric, int | float)}
    return values | {name + suffix: x for name, m in settle(typed).items() for suffix, x in m.compute().items()}


def settle(metrics: Mapping[str, Metric]) -> Metrics:
    """The same metrics with every tensor turned into a float, fetched from each device in one copy.

    Call it before metrics leave a process: what crosses to another rank is plain numbers.
    """
    found: list[Tensor] = []
    for metric in metrics.values():
        _collect(metric, found)
    if not found:
        return dict(metrics)
    values = [float(tensor) if tensor.device.type == "cpu" else 0.0 for tensor in found]
    remote = [i for i, tensor in enumerate(found) if tensor.device.type != "cpu"]
    for device in {found[i].device for i in remote}:
        here = [i for i in remote if found[i].device == device]
        fetched = torch.stack([found[i].detach().double().reshape(()) for i in here]).tolist()
        for i, value in zip(here, fetched, strict=True):
            values[i] = value
    numbers = iter(values)
    return {name: _fill(metric, numbers) for name, metric in metrics.items()}


def stats(name: str, values: Num[Tensor, "..."], mask: Bool[Tensor, "..."] | None = None) -> Metrics:
    """`{name}/mean`, `/max`, `/min` over the values (where `mask`); no values, no keys."""
    chosen = values.detach() if mask is None else values.detach()[mask]
    if chosen.numel() == 0:
        return {}
    return {
        f"{name}/mean": Mean(double_sum(chosen), float(chosen.numel())),
        f"{name}/max": Max(chosen.max()),
        f"{name}/min": Min(chosen.min()),
    }


def double_sum(values: Num[Tensor, "..."]) -> Num[Tensor, ""]:
    """A sum in double precision, without a double copy: blocks in their own precision, the blocks' sums in double."""
    if not values.is_floating_point():
        return values.sum(dtype=torch.float64)
    if values.numel() <= SUM_BLOCK:
        return values.sum().double()
    return torch.stack([block.sum() for block in values.reshape(-1).split(SUM_BLOCK)]).double().sum()


def masked_mean(values: Num[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Mean:
    """Mean over the entries where `mask` is true; values at masked entries never count, even NaN ones."""
    kept = torch.where(mask, values.detach(), 0.0)
    return Mean(double_sum(kept), mask.sum())


def _extreme(a: Number, b: Number, *, largest: bool) -> Number:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        device = a.device if isinstance(a, Tensor) else b.device  # type: ignore[union-attr]
        pair = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device).reshape(()) for x in (a, b)])
        return pair.max() if largest else pair.min()
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return max(a, b) if largest else min(a, b)


def _collect(metric: Metric, found: list[Tensor]) -> None:
    for value in vars(metric).values():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Std):
            _collect(value, found)


def _fill(metric: Metric, numbers: Iterator[float]) -> Metric:
    filled: dict[str, Any] = {}
    for name, value in vars(metric).items():
        if isinstance(value, Tensor):
            filled[name] = next(numbers)
        elif isinstance(value, Std):
            filled[name] = _fill(value, numbers)
    return replace(metric, **filled) if filled else metric
