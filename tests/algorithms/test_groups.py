"""Groups by any label."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from megatron_dapo.algorithms.groups import Grouped, dense_groups
from tests.algorithms.cases import given

LABELS = st.lists(st.integers(0, 3), min_size=1, max_size=10)


@given(LABELS)
def test_any_kind_of_label_makes_the_same_groups(labels: list[int]) -> None:
    expected = dense_groups(labels)
    assert sorted(set(expected.tolist())) == list(range(len(set(labels))))
    for other in (
        [f"uid-{label}" for label in labels],
        [(label, "x") for label in labels],
        [-1000003 * label - 7 for label in labels],
        np.array(labels),
        np.array([f"g{label}" for label in labels], dtype=object),
        torch.tensor(labels),
    ):
        assert torch.equal(dense_groups(other), expected)


@given(LABELS, st.data())
def test_statistics_are_those_of_each_group(labels: list[int], data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.floats(-100, 100, width=32), min_size=len(labels), max_size=len(labels)))
    group = Grouped(torch.tensor(scores, dtype=torch.float64), labels)
    for row, label in enumerate(labels):
        own = torch.tensor([s for s, other in zip(scores, labels, strict=True) if other == label], dtype=torch.float64)
        assert group.centred()[row].item() == pytest.approx((scores[row] - own.mean()).item(), abs=1e-9)
        std = own.std().item() if len(own) > 1 else 0.0
        assert group.std()[row].item() == pytest.approx(std, abs=1e-6)
        assert bool(group.is_single[row]) == (len(own) == 1)
        assert bool(group.is_constant[row]) == (len(set(own.tolist())) == 1)


@pytest.mark.parametrize("offset", [0.0, 0.1, 1e6, -1e9])
def test_constant_groups_are_exactly_zero_and_offsets_cost_nothing(offset: float) -> None:
    same = Grouped(torch.full((7,), offset, dtype=torch.float64), ["g"] * 7)
    assert (same.centred() == 0).all() and (same.std() == 0).all() and same.is_constant.all()
    near = Grouped(torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64) + offset, ["g"] * 3)
    assert torch.allclose(near.std(), torch.full((3,), 0.5, dtype=torch.float64), rtol=1e-6)


def test_uncounted_samples_do_not_enter_the_statistics() -> None:
    group = Grouped(torch.tensor([1.0, 0.0, 100.0]), ["g"] * 3, torch.tensor([True, True, False]))
    assert group.centred().tolist() == [0.5, -0.5, 99.5]
    nobody = Grouped(torch.tensor([1.0, 0.0]), ["g"] * 2, torch.zeros(2, dtype=torch.bool))
    assert nobody.is_constant.all() and nobody.std().eq(0).all()


def test_each_sample_needs_a_label() -> None:
    with pytest.raises(ValueError, match="2 group ids for 3 samples"):
        Grouped(torch.zeros(3), ["a", "b"])
