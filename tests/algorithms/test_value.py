"""The critic's loss."""

import hypothesis.strategies as st
import pytest
import torch

from megatron_dapo.algorithms import AGGREGATION_MODES, aggregate_loss, value_loss
from tests.algorithms.cases import Batch, batches, given, padded


def test_oracle() -> None:
    values, returns = torch.tensor([[0.5, 1, -1, 3]]), torch.tensor([[1.0, 1, 1, 0]])
    old, mask = torch.tensor([[0.0, 2, 0, 0]]), torch.tensor([[1, 1, 1, 0]]).bool()
    loss, metrics = value_loss(values, returns, old, mask, cliprange=0.5)
    assert aggregate_loss(loss, mask, "token-mean").item() == pytest.approx(0.75)
    assert metrics == pytest.approx({"critic/vf_clipfrac": 1 / 3, "critic/vpred_mean": 0.5 / 3})


@given(batches())
def test_is_the_clipped_formula_and_ignores_padding(batch: Batch) -> None:
    values, returns, old = batch.logprob, batch.advantages, batch.old_logprob
    held = old + (values - old).clamp(-0.2, 0.2)
    formula = 0.5 * torch.maximum((values - returns) ** 2, (held - returns) ** 2)
    x = padded(values, 2).requires_grad_()
    loss, metrics = value_loss(x, padded(returns, 2), padded(old, 2), padded(batch.mask, 2), cliprange=0.2)
    assert torch.allclose(loss[:, :-2], torch.where(batch.mask, formula, 0.0))
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert gradient.isfinite().all() and (gradient[~padded(batch.mask, 2)] == 0).all()
    assert 0 <= metrics["critic/vf_clipfrac"] <= 1


@given(batches())
def test_gradient_by_differences(batch: Batch) -> None:
    values = batch.logprob.requires_grad_()
    arguments = (batch.advantages, batch.old_logprob, batch.mask)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, *arguments, cliprange=0.2)[0], values)


@given(st.sampled_from(AGGREGATION_MODES), batches(min_rows=2))
def test_micro_batches_add_up(mode: str, batch: Batch) -> None:
    def total(rows: Batch) -> torch.Tensor:
        loss, _ = value_loss(rows.logprob, rows.advantages, rows.old_logprob, rows.mask, cliprange=0.2)
        return aggregate_loss(
            loss, rows.mask, mode, global_tokens=int(batch.mask.sum()), global_sequences=len(batch.mask), horizon=4
        )

    assert torch.allclose(total(batch.rows(slice(0, 1))) + total(batch.rows(slice(1, None))), total(batch))


def test_negative_cliprange_is_an_error() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"cliprange_value.*-0\.1"):
        value_loss(x, x, x, x.bool(), cliprange=-0.1)
