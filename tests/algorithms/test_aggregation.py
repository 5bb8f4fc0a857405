"""aggregate_loss: oracle numbers, and the promise that no split of a batch changes the loss or its gradient."""

import hypothesis.strategies as st
import pytest
import torch

from megatron_dapo.algorithms import AGGREGATION_MODES, aggregate_loss
from tests.algorithms.cases import Batch, batches, given, padded

MATRIX = torch.arange(1.0, 13.0).reshape(3, 4)
ROWS = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
MODES = pytest.mark.parametrize("mode", AGGREGATION_MODES)


@pytest.mark.parametrize(
    ("mode", "local", "of_two_ranks", "with_horizon"),
    [
        ("token-mean", 7.5, 4.5, 4.5),
        ("token-sum", 45, 90, 90),
        ("seq-mean-token-sum", 22.5, 15, 15),
        ("seq-mean-token-mean", 6.0, 4.0, 4.0),
        ("seq-mean-token-sum-norm", 5.625, 3.75, 0.15),
    ],
)
def test_oracle(mode: str, local: float, of_two_ranks: float, with_horizon: float) -> None:
    counts = {"global_tokens": 20, "global_sequences": 6, "dp_size": 2}
    assert aggregate_loss(MATRIX, ROWS, mode).item() == pytest.approx(local)
    assert aggregate_loss(MATRIX, ROWS, mode, **counts).item() == pytest.approx(of_two_ranks)
    assert aggregate_loss(MATRIX, ROWS, mode, **counts, horizon=100).item() == pytest.approx(with_horizon)


def test_unknown_mode_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"token-meen.*token-mean"):
        aggregate_loss(MATRIX, ROWS, "token-meen")


@pytest.mark.parametrize(
    ("mode", "name"), [("token-mean", "global_tokens"), ("seq-mean-token-sum", "global_sequences")]
)
def test_ranks_need_global_counts(mode: str, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        aggregate_loss(MATRIX, ROWS, mode, dp_size=2)


@MODES
def test_all_masked_is_zero_with_zero_gradient(mode: str) -> None:
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    for counts in (
        {},
        {"global_tokens": 0, "global_sequences": 0},
        {"global_tokens": torch.tensor(0), "global_sequences": torch.tensor(0)},
    ):
        total = aggregate_loss(loss, torch.zeros(2, 3), mode, **counts)
        (gradient,) = torch.autograd.grad(total, loss)
        assert total.item() == 0
        assert torch.equal(gradient, torch.zeros(2, 3))


@MODES
@given(batches())
def test_padding_never_leaks(mode: str, batch: Batch) -> None:
    """NaN and inf under the mask and behind it change neither value nor gradient."""
    clean = torch.where(batch.mask, batch.advantages, 0.0).requires_grad_()
    dirty = padded(torch.where(batch.mask, batch.advantages, float("nan")), 2).requires_grad_()
    expected = aggregate_loss(clean, batch.mask, mode, horizon=7)
    found = aggregate_loss(dirty, padded(batch.mask, 2), mode, horizon=7)
    (g_clean,), (g_dirty,) = torch.autograd.grad(expected, clean), torch.autograd.grad(found, dirty)
    assert torch.allclose(found, expected)
    assert torch.allclose(g_dirty, torch.nn.functional.pad(g_clean, (0, 2)))


@MODES
@given(batches(min_rows=2, max_rows=8), st.data())
def test_any_split_sums_to_the_whole(mode: str, batch: Batch, data: st.DataObject) -> None:
    """Rows dealt to ranks and micro-batches at random, one of them empty: mean over ranks of sums is the whole, to 1e-6."""
    loss = batch.advantages.float().requires_grad_()
    rows, ranks = len(loss), data.draw(st.integers(1, 3))
    owner = torch.tensor([data.draw(st.integers(0, 2 * ranks - 1)) for _ in range(rows)])
    counts = {"global_tokens": int(batch.mask.sum()), "global_sequences": rows, "horizon": 9}
    whole = aggregate_loss(loss, batch.mask, mode, **counts)
    parts = [
        aggregate_loss(loss[owner == part], batch.mask[owner == part], mode, **counts, dp_size=ranks)
        for part in range(2 * ranks)
    ]
    total = torch.stack(parts).sum() / ranks
    assert torch.allclose(total, whole, rtol=1e-6, atol=1e-6)
    (split_gradient,), (gradient,) = torch.autograd.grad(total, loss), torch.autograd.grad(whole, loss)
    assert torch.allclose(split_gradient, gradient, rtol=1e-6, atol=1e-7)


@MODES
@given(batches())
def test_order_mask_type_and_dtype_do_not_matter(mode: str, batch: Batch) -> None:
    expected = aggregate_loss(batch.advantages, batch.mask, mode)
    order = torch.randperm(len(batch.mask), generator=batch.generator)
    assert torch.allclose(aggregate_loss(batch.advantages[order], batch.mask[order], mode), expected)
    assert torch.allclose(aggregate_loss(batch.advantages, batch.mask.long(), mode), expected)
    half = aggregate_loss(batch.advantages.bfloat16(), batch.mask, mode)
    assert half.dtype == torch.float32
    assert torch.allclose(half.double(), aggregate_loss(batch.advantages.bfloat16().double(), batch.mask, mode))


@MODES
@given(batches())
def test_gradient_by_differences(mode: str, batch: Batch) -> None:
    loss = batch.advantages.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: aggregate_loss(x, batch.mask, mode, global_tokens=5, global_sequences=4), loss
    )
