"""A storage larger than a bucket travels in parts: ranges of its first dimension, each a storage of its own on the way.

Both ends cut a layout in the same way, so everything between them knows only storages that fit a bucket.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from megatron_dapo.models.slices import Layout, Slice
from megatron_dapo.resharding.layouts import ITEM_SIZE, Segment, extents, segment, share_equal, storage_box
from megatron_dapo.resharding.memory import torch_dtype

MARK = "@"  # between a storage's name and the first row of a part


@dataclass(frozen=True)
class Parts:
    """A layout as it travels: its large storages in parts, the parts of one next to each other."""

    layout: Layout
    dtypes: Mapping[str, str]
    place: Segment
    whole: Segment

    @classmethod
    def of(cls, layout: Layout, dtypes: Mapping[str, str], bucket_bytes: int) -> "Parts":
        shapes = extents(layout)
        rows = {param: _rows(shape, ITEM_SIZE[dtypes[param]], bucket_bytes) for param, shape in shapes.items()}
        order = {param: i for i, param in enumerate(shapes)}
        cut = [(order[piece.param], start, part) for piece in layout for start, part in _cut(piece, rows[piece.param])]
        pieces = tuple(part for _, _, part in sorted(cut, key=lambda row: row[:2]))  # stable
        of_parts = {part.param: dtypes[_base(part.param, shapes)] for part in pieces}
        return cls(pieces, of_parts, segment(pieces, of_parts), segment(layout, dtypes))

    def joined(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Whole storages out of a stream of what has arrived: whoever takes them packs them as a whole."""
        left = Counter(_base(name, self.whole.storages) for name in self.place.storages)
        held: dict[str, Tensor] = {}  # the storage of which parts are arriving
        for name, part in stream:
            param = _base(name, self.whole.storages)
            if name == param:
                yield name, part
                continue
            if param not in held:
                storage = self.whole.storages[param]
                held[param] = torch.empty(storage.shape, dtype=torch_dtype(storage.dtype), device=part.device)
            start = int(name.rpartition(MARK)[2])
            held[param][start:][tuple(slice(n) for n in part.shape)].copy_(part)
            left[param] -= 1
            if not left[param]:
                yield param, held.pop(param)


def in_parts(destinations: Mapping[int, Layout], dtypes: Mapping[str, str], bucket_bytes: int) -> dict[int, Parts]:
    """The layouts of all destinations as they travel; equal ones are cut once and stay one object."""
    shared = share_equal(destinations)
    cut = {
        id(layout): Parts.of(layout, dtypes, bucket_bytes) for layout in {id(x): x for x in shared.values()}.values()
    }
    return {d: cut[id(layout)] for d, layout in shared.items()}


def dtypes_of(place: Segment) -> dict[str, str]:
    return {name: storage.dtype for name, storage in place.storages.items()}


def _rows(shape: tuple[int, ...], item: int, bucket_bytes: int) -> int | None:
    """Rows of a part; None for a storage that fits a bucket."""
    row = prod(shape[1:]) * item
    return None if shape[0] * row <= bucket_bytes or shape[0] == 1 else max(1, bucket_bytes // row)


def _cut(piece: Slice, rows: int | None) -> Iterator[tuple[int, Slice]]:
    """The parts of a slice, each with the first row of the part of the storage that it lies in."""
    (first, *_), (count, *_) = storage_box(piece)
    if rows is None:
        yield 0, piece
        return
    stacked = len(piece.param_offset) > len(piece.shape)  # then a slice has one row
    for start in range(first // rows * rows, first + count, rows):
        low, high = max(start, first), min(start + rows, first + count)
        inside = (low - start, *piece.param_offset[1:])
        part = replace(piece, param=f"{piece.param}{MARK}{start}", param_offset=inside)
        if not stacked:
            offset = (piece.offset[0] + low - first, *piece.offset[1:])
            part = replace(part, offset=offset, shape=(high - low, *piece.shape[1:]))
        yield start, part


def _base(name: str, whole: Mapping[str, object]) -> str:
    return name if name in whole else name.rpartition(MARK)[0]
