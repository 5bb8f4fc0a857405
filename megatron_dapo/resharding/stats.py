"""What a plan costs: bytes against the least possible and against whole tensors, and how evenly they are sent."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_dapo.models.slices import Layout
from megatron_dapo.resharding.plan import Plan

BUCKETS = 2  # a transport packs one bucket while another is on its way


@dataclass(frozen=True)
class PlanStats:
    """`bytes_lower_bound`: what the destinations store. `naive_bytes`: every tensor whole to every destination.

    `peak_buffer_bytes` is what a sender holds besides its weights when it packs buckets of `bucket_bytes`; `pairs` is
    the number of (source, destination) pairs that exchange anything.
    """

    transfers: int
    bytes_moved: int
    bytes_lower_bound: int
    ratio: float
    naive_bytes: int
    send_max_over_mean: float
    send_max_bytes: int
    receive_max_bytes: int
    pairs: int
    largest_pair: tuple[int, int, int]  # source, destination, bytes
    peak_buffer_bytes: int

    def seconds(self, bytes_per_second: float) -> float:
        """How long the busiest rank needs at this bandwidth per rank and direction, everything overlapping."""
        return max(self.send_max_bytes, self.receive_max_bytes) / bytes_per_second


def plan_stats(
    plan: Plan,
    sources: Mapping[int, Layout],
    destinations: Mapping[int, Layout],
    item_size: int = 2,
    bucket_bytes: int = 256 * 2**20,
) -> PlanStats:
    """Count a plan, with `item_size` bytes per element."""
    moved = plan.elements * item_size
    rows = {rank: row for row, rank in enumerate(sources)}
    row = np.zeros(max(sources, default=0) + 1, np.int64)
    row[list(rows)] = list(rows.values())
    width = max(destinations, default=0) + 1
    pair_bytes = np.bincount(row[plan.source] * width + plan.destination, moved, minlength=len(rows) * width)
    table = pair_bytes.astype(np.int64).reshape(len(rows), width)
    sent, received = table.sum(axis=1), table.sum(axis=0)
    busiest, reader = np.unravel_index(int(table.argmax()), table.shape)
    total = int(moved.sum())
    bound = lower_bound(destinations) * item_size
    return PlanStats(
        transfers=len(plan.pair),
        bytes_moved=total,
        bytes_lower_bound=bound,
        ratio=total / bound if bound else 1.0,
        naive_bytes=whole_elements(plan) * item_size * len(destinations),
        send_max_over_mean=float(sent.max() / sent.mean()) if total else 1.0,
        send_max_bytes=int(sent.max()),
        receive_max_bytes=int(received.max()),
        pairs=int((table > 0).sum()),
        largest_pair=(list(sources)[int(busiest)], int(reader), int(table.max())),
        peak_buffer_bytes=BUCKETS * min(bucket_bytes, int(sent.max())),
    )


def lower_bound(destinations: Mapping[int, Layout]) -> int:
    """Elements that all destinations store together."""
    sizes: dict[int, int] = {}
    for layout in destinations.values():
        if id(layout) not in sizes:
            sizes[id(layout)] = sum(piece.numel for piece in layout)
    return sum(sizes[id(layout)] for layout in destinations.values())


def whole_elements(plan: Plan) -> int:
    """Elements of all tensors that move, each counted once and in full."""
    high = np.zeros((len(plan.tensors), plan.pair_high.shape[1]), np.int64)
    np.maximum.at(high, plan.pair_tensor, plan.pair_high)
    return int(np.prod(high, axis=1).sum())
