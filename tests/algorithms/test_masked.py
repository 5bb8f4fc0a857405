"""Masked statistics: agreement with the plain ones on the valid entries, and silence of the others."""

import pytest
import torch

from megatron_dapo.algorithms.masked import floats, masked_mean, masked_sum, masked_whiten, real, row_means
from tests.algorithms.cases import Batch, batches, given, padded


@given(batches(min_rows=2))
def test_statistics_are_those_of_the_valid_entries(batch: Batch) -> None:
    dirty = torch.where(batch.mask, batch.advantages, float("nan"))
    entries = batch.advantages[batch.mask]
    assert torch.allclose(masked_sum(dirty, batch.mask), entries.sum())
    assert torch.allclose(masked_mean(dirty, batch.mask), entries.mean())
    for row, mean in enumerate(row_means(dirty, batch.mask)):
        assert torch.allclose(mean, batch.advantages[row][batch.mask[row]].mean())


@given(batches(min_rows=2))
def test_whitened_entries_have_mean_0_and_variance_1(batch: Batch) -> None:
    white = masked_whiten(padded(batch.advantages, 3), padded(batch.mask, 3))
    entries = white[padded(batch.mask, 3)]
    assert torch.allclose(entries.mean(), torch.zeros((), dtype=entries.dtype), atol=1e-6)
    if len(entries) > 1 and batch.advantages[batch.mask].std() > 1e-2:
        assert torch.allclose(entries.var(), torch.ones((), dtype=entries.dtype), atol=1e-3)
    assert (white[~padded(batch.mask, 3)] == 0).all()


@pytest.mark.parametrize("valid", [0, 1])
def test_whitening_needs_two_tokens(valid: int) -> None:
    with pytest.raises(ValueError, match=f"the mask has {valid}"):
        masked_whiten(torch.ones(1, 3), torch.arange(3)[None] < valid)


def test_empty_means_are_zero() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert masked_mean(torch.full((2, 3), float("nan")), nothing) == 0
    assert torch.equal(row_means(torch.full((2, 3), float("inf")), nothing), torch.zeros(2))


def test_widening_and_fetching() -> None:
    assert real(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert real(torch.ones(1, dtype=torch.long)).dtype == torch.float32
    assert real(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert floats({}) == {}
    assert floats({"a": torch.tensor(0.5), "b": torch.tensor(2.0, requires_grad=True)}) == {"a": 0.5, "b": 2.0}
