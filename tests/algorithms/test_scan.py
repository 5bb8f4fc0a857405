"""Backward sums, against the loop they replace."""

import hypothesis.strategies as st
import torch

from megatron_dapo.algorithms.scan import next_valid, reverse_scan, reward_to_go
from tests.algorithms.cases import Batch, batches, given


@given(batches(), st.floats(0, 1))
def test_reward_to_go_is_the_loop(batch: Batch, gamma: float) -> None:
    found = reward_to_go(batch.advantages, batch.mask, gamma)
    running = torch.zeros(len(batch.mask), dtype=torch.float64)
    for t in reversed(range(batch.mask.shape[1])):
        running = batch.advantages[:, t] + torch.where(batch.mask[:, t], gamma, 1.0) * running
        assert torch.allclose(found[:, t], running)


@given(batches())
def test_next_valid_is_the_loop(batch: Batch) -> None:
    found = next_valid(batch.advantages, batch.mask)
    ahead = torch.zeros(len(batch.mask), dtype=torch.float64)
    for t in reversed(range(batch.mask.shape[1])):
        assert torch.allclose(found[:, t], ahead)
        ahead = torch.where(batch.mask[:, t], batch.advantages[:, t], ahead)


def test_long_scan_keeps_its_precision() -> None:
    ones = torch.ones(1, 4097, dtype=torch.float64)
    assert torch.equal(reverse_scan(ones, ones)[0], torch.arange(4097, 0, -1, dtype=torch.float64))
