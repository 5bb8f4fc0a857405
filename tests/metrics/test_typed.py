"""Reductions are exact however the work was split, and "nothing seen" is never a number."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.metrics import (
    Correlation,
    ExplainedVariance,
    Histogram,
    Last,
    Max,
    Mean,
    Min,
    PerLayer,
    Std,
    Sum,
    compute,
    masked_mean,
    merge,
    reduce,
    settle,
    stats,
)

FLOATS = st.floats(-1e3, 1e3, allow_nan=False)


def everything(values: torch.Tensor) -> dict:
    return stats("x", values) | {
        "sum": Sum(values.sum()),
        "std": Std.of(values),
        "hist": Histogram.of(values, (-1e3, -10.0, 0.0, 10.0, 1e3)),
        "explained": ExplainedVariance(Std.of(values * 0.5), Std.of(values)),
        "correlation": Correlation.of(values, values.square()),
        "layers": PerLayer((float(values.sum()), 1.0 * len(values)), len(values)),
    }


@given(st.lists(st.lists(FLOATS, max_size=6), min_size=1, max_size=5))
def test_any_split_gives_what_the_whole_gives(parts):
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    merged = compute(reduce(everything(t) for t in tensors))
    whole = compute(everything(torch.cat(tensors)))
    assert merged.keys() == whole.keys()
    for name, value in whole.items():
        assert merged[name] == pytest.approx(value, rel=1e-9, abs=1e-6), name


def test_correlation_is_pearsons():
    x = torch.tensor([1.0, 2.0, 4.0, 7.0])
    y = torch.tensor([2.0, 1.0, 9.0, 3.0])
    whole = Correlation.of(x, y).compute()[""]
    assert whole == pytest.approx(float(torch.corrcoef(torch.stack([x, y]))[0, 1]))
    assert Correlation.of(x, y * 0).compute() == {}


def test_a_mean_over_one_and_a_hundred_tokens_is_weighted():
    a, b = Mean(5.0, 1), Mean(0.0, 100)
    assert compute(merge({"m": a}, {"m": b})) == {"m": pytest.approx(5 / 101)}


def test_empty_input_gives_no_key():
    nothing = torch.tensor([])
    empty = everything(nothing) | {"m": masked_mean(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))}
    assert compute(empty) == {"sum": 0.0}
    assert compute({}) == {} and reduce([]) == {}


def test_names_do_not_decide_the_reduction():
    first = {"actor/min_terminal_max_lr": Mean(1.0, 1), "minibatch/sum": Last(3.0)}
    second = {"actor/min_terminal_max_lr": Mean(3.0, 1), "minibatch/sum": Last(4.0)}
    assert compute(merge(first, second)) == {"actor/min_terminal_max_lr": 2.0, "minibatch/sum": 4.0}


def test_two_kinds_under_one_name_are_an_error_that_says_so():
    with pytest.raises(TypeError, match="'a/b' comes as Sum and Max"):
        merge({"a/b": Sum(1)}, {"a/b": Max(1)})


def test_nan_is_kept_by_extremes_and_masked_nan_is_not_seen():
    for kind in (Max, Min):
        assert math.isnan(compute(merge({"x": kind(math.nan)}, {"x": kind(1.0)}))["x"])
        assert math.isnan(compute(merge({"x": kind(torch.tensor(1.0))}, {"x": kind(math.nan)}))["x"])
    values = torch.tensor([[1.0, math.nan], [3.0, math.inf]])
    assert compute({"m": masked_mean(values, torch.tensor([[True, False], [True, False]]))}) == {"m": 2.0}


def test_last_takes_the_newer_one_and_the_right_one_on_a_tie():
    assert compute(merge({"lr": Last(1.0, 5)}, {"lr": Last(2.0, 4)})) == {"lr": 1.0}
    assert compute(merge({"lr": Last(1.0)}, {"lr": Last(2.0)})) == {"lr": 2.0}


def test_settled_metrics_hold_plain_numbers_and_cross_processes():
    metrics = everything(torch.arange(5.0)) | {"one": Mean(torch.tensor(2.0), torch.tensor(4))}
    settled = settle(metrics)
    assert b"torch" not in pickle.dumps(settled)
    assert compute(settled) == compute(metrics)


def test_histogram_quantiles_and_edges():
    hist = Histogram.of(torch.arange(100.0), tuple(float(i) for i in range(0, 101, 10)))
    assert compute({"len": hist}) == {
        "len/p10": pytest.approx(10),
        "len/p50": pytest.approx(50),
        "len/p90": pytest.approx(90),
        "len/p99": pytest.approx(99),
    }
    with pytest.raises(ValueError, match="increase"):
        Histogram.of(torch.ones(1), (1.0, 1.0))
    with pytest.raises(ValueError, match="different edges"):
        hist.merge(Histogram.of(torch.ones(1), (0.0, 1.0)))
