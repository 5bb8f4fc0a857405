"""The checksum adds up over cuts and sees single bits."""

import pytest
import torch

from megatron_dapo.resharding.checksum import checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_it_adds_up_over_any_cut(dtype: torch.dtype) -> None:
    box = (torch.randn(7, 9, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    parts = [box[:3, :5], box[3:, :5], box[:, 5:8], box[:, 8:]]
    assert checksum(box) == sum(map(checksum, parts)) % 2**64


def test_it_sees_every_bit() -> None:
    box = torch.zeros(4, 5)
    sums = {checksum(box)}
    for bit in range(32):
        changed = box.clone()
        changed.view(torch.int32)[2, 3] = 1 << bit if bit < 31 else -(1 << 31)
        sums.add(checksum(changed))
    assert len(sums) == 33
