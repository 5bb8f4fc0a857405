"""The group filter and the metrics it may look at."""

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from megatron_dapo.algorithms import filter_value, group_filter
from megatron_dapo.algorithms.filtering import has_signal
from tests.algorithms.cases import given


@dataclass(frozen=True)
class Score:
    reward: float
    raw: float
    acc: float
    extra: dict[str, Any] = field(default_factory=dict)


def test_keeps_lone_samples_and_groups_whose_values_differ() -> None:
    kept = group_filter([1, 0, 0, 0, 1, 1, 0.3], ["a", "a", "b", "b", "c", "c", "d"])
    assert kept.tolist() == [True, True, False, False, False, False, True]


@pytest.mark.parametrize("value", [0.1, 1 / 3, -1.0, True, np.float32(0.7)])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_floats_are_equal(value: float, size: int) -> None:
    """A float standard deviation of equal numbers need not be 0: np.std([0.1] * 3) is 1.4e-17."""
    assert not has_signal([value] * size)
    assert not group_filter([value] * size, ["g"] * size).any()
    assert has_signal([value] * size + [float(value) + 1e-6])


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 1.0])), min_size=1, max_size=12), st.randoms())
def test_agrees_with_the_rule_in_any_order_and_for_any_label(samples: list[tuple[int, float]], random: Any) -> None:
    ids, values = [s[0] for s in samples], [s[1] for s in samples]
    kept = group_filter(values, ids).tolist()
    for i, label in enumerate(ids):
        own = [v for v, other in zip(values, ids, strict=True) if other == label]
        assert kept[i] == (len(own) == 1 or len(set(own)) > 1) == has_signal(own)
    order = list(range(len(ids)))
    random.shuffle(order)
    assert group_filter([values[i] for i in order], [f"u{ids[i]}" for i in order]).tolist() == [kept[i] for i in order]
    assert group_filter(torch.tensor(values), torch.tensor(ids)).tolist() == kept
    assert group_filter(np.array(values), np.array(ids)).tolist() == kept


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"samples \[1\] are NaN"):
        group_filter([0.0, float("nan")], ["a", "a"])
    with pytest.raises(ValueError, match="NaN"):
        has_signal([float("nan"), 0.0])
    with pytest.raises(ValueError, match="1 group ids for 2 values"):
        group_filter([0.0, 1.0], ["a"])
    assert group_filter([], []).shape == (0,)
    assert not has_signal([])


def test_metric_names() -> None:
    score = Score(reward=0.5, raw=1.0, acc=1.0, extra={"format": 0.25, "overlong": True})
    for metric, expected in {
        "reward": 1.0,
        "score": 1.0,
        "acc": 1.0,
        "seq_reward": 0.5,
        "format": 0.25,
        "overlong": 1.0,
    }.items():
        assert filter_value(score, metric) == expected
    assert filter_value(score, "seq_final_reward", final_reward=0.4) == 0.4
    with pytest.raises(ValueError, match="after KL"):
        filter_value(score, "seq_final_reward")
    with pytest.raises(ValueError, match=r"'length'.*\['format', 'overlong'\]"):
        filter_value(score, "length")
