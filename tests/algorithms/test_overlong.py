"""The soft overlong punishment."""

import hypothesis.strategies as st
import pytest
import torch

from megatron_dapo.algorithms import overlong_penalty
from tests.algorithms.cases import given


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (40960, -1.0)]
)
def test_worked_values(length: int, penalty: float) -> None:
    found = overlong_penalty(length, 20480, 4096, 1.0)
    assert isinstance(found, float) and found == penalty
    assert str(found) != "-0.0"


def test_unbounded_reference_rule() -> None:
    assert overlong_penalty(24576, 20480, 4096, 1.0, reference_unbounded=True) == -2.0
    assert overlong_penalty(torch.tensor([24576]), 20480, 4096, 1.0, reference_unbounded=True).item() == -2.0


@given(st.integers(1, 5000), st.data(), st.floats(0, 10))
def test_bounded_monotone_and_the_same_for_tensors(max_length: int, data: st.DataObject, factor: float) -> None:
    buffer = data.draw(st.integers(1, max_length))
    lengths = sorted(data.draw(st.lists(st.integers(0, 2 * max_length), min_size=1, max_size=8)))
    penalties = [overlong_penalty(length, max_length, buffer, factor) for length in lengths]
    assert all(-factor <= p <= 0 for p in penalties)
    assert penalties == sorted(penalties, reverse=True)
    tensor = overlong_penalty(torch.tensor(lengths), max_length, buffer, factor)
    assert tensor.tolist() == pytest.approx(penalties, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("buffer", "factor", "named"), [(0, 1.0, "buffer"), (11, 1.0, "max_length=10"), (5, -1.0, "factor")]
)
def test_bad_settings_are_named(buffer: int, factor: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        overlong_penalty(3, 10, buffer, factor)
