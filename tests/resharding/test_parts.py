"""A storage that is larger than a bucket travels in parts that are not, and arrives whole."""

import pytest
import torch

from megatron_dapo.models.slices import Slice
from megatron_dapo.resharding.layouts import extents
from megatron_dapo.resharding.parts import Parts
from tests.resharding.test_transports import DTYPES, WORKERS, expected, weights
from tests.tiny_vllm import hold


@pytest.mark.parametrize("bucket", [150, 700, 10**6])
def test_no_part_exceeds_a_bucket_and_all_come_together(bucket: int):
    tensors = weights(1)
    parts = Parts.of(WORKERS[1], DTYPES, bucket)
    rows = {param: 2 * torch.Size(shape[1:]).numel() for param, shape in extents(WORKERS[1]).items()}  # bfloat16
    for name, storage in parts.place.storages.items():
        assert storage.nbytes <= max(bucket, rows[name.partition("@")[0]])
    assert (set(parts.layout) == set(WORKERS[1])) == (bucket == 10**6)
    travelling = {name: part.bfloat16() for name, part in hold(parts.layout, tensors).items()}
    assert list(travelling) == list(parts.place.storages)
    got = dict(parts.joined(travelling.items()))
    want = expected(tensors, 1)
    assert list(got) == list(extents(WORKERS[1]))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_cuts_follow_the_storage_and_not_the_tensor():
    """Two tensors in one storage of ten rows, in parts of four."""
    layout = (Slice("a", (7, 0), (5, 2), "w", (0, 0)), Slice("b", (0, 0), (5, 2), "w", (5, 0)))
    parts = Parts.of(layout, {"w": "float32"}, 32)
    assert [(p.tensor, p.offset[0], p.shape[0], p.param, p.param_offset[0]) for p in parts.layout] == [
        ("a", 7, 4, "w@0", 0),
        ("a", 11, 1, "w@4", 0),
        ("b", 0, 3, "w@4", 1),
        ("b", 3, 2, "w@8", 0),
    ]
