"""Who sends which box to whom: the intersections of two sets of layouts, in columns: a million transfers are cheap.

Every destination receives each element it stores exactly once and nothing else; holders of the same box take turns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dapo.models.slices import Layout

DIMS = 3  # boxes are padded with [0, 1) to this many dimensions


class PlanError(ValueError):
    """The sources cannot serve the destinations: something is missing or has another shape."""


@dataclass(frozen=True)
class Transfer:
    """One box of one HF tensor on its way from a slice of the sender to a slice of the receiver."""

    source: int
    destination: int
    source_slice: int
    destination_slice: int
    offset: tuple[int, ...]  # in the HF tensor
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Boxes:
    """Distinct boxes of many holders. `holder`/`slice` list who has each box: rows `start[i] : start[i + 1]`."""

    tensor: np.ndarray  # [boxes]
    low: np.ndarray  # [boxes, DIMS]
    high: np.ndarray
    start: np.ndarray  # [boxes + 1]
    holder: np.ndarray  # [members]
    slice: np.ndarray


@dataclass(frozen=True)
class Plan:
    """All transfers, as columns: transfer i moves box `pair[i]` from holder `source[i]` to `destination[i]`."""

    tensors: tuple[str, ...]
    ndim: np.ndarray  # [tensors]
    pair_tensor: np.ndarray  # [pairs]
    pair_low: np.ndarray  # [pairs, DIMS]
    pair_high: np.ndarray
    pair: np.ndarray  # [transfers]
    source: np.ndarray
    destination: np.ndarray
    source_slice: np.ndarray
    destination_slice: np.ndarray

    @cached_property
    def elements(self) -> np.ndarray:
        """Elements moved by each transfer."""
        return np.prod(self.pair_high - self.pair_low, axis=1)[self.pair]

    def sends(self, source: int) -> list[Transfer]:
        return [self.transfer(i) for i in np.flatnonzero(self.source == source).tolist()]

    def receives(self, destination: int) -> list[Transfer]:
        return [self.transfer(i) for i in np.flatnonzero(self.destination == destination).tolist()]

    def transfer(self, i: int) -> Transfer:
        pair = int(self.pair[i])
        ndim = int(self.ndim[self.pair_tensor[pair]])
        low = self.pair_low[pair, :ndim]
        return Transfer(
            int(self.source[i]),
            int(self.destination[i]),
            int(self.source_slice[i]),
            int(self.destination_slice[i]),
            tuple(low.tolist()),
            tuple((self.pair_high[pair, :ndim] - low).tolist()),
        )


def plan(sources: Mapping[int, Layout], destinations: Mapping[int, Layout]) -> Plan:
    """Match what destinations store with what sources hold. Raises PlanError naming a tensor that cannot be served."""
    names: dict[str, int] = {}
    ndims: list[int] = []
    wanted = distinct_boxes(destinations, names, ndims)
    held = distinct_boxes(sources, names, ndims)
    tensors = tuple(names)
    want, have = candidate_pairs(wanted.tensor, held.tensor, len(tensors))
    low = np.maximum(wanted.low[want], held.low[have])
    high = np.minimum(wanted.high[want], held.high[have])
    real = (low < high).all(axis=1)
    want, have, low, high = want[real], have[real], low[real], high[real]
    want, have, low, high = cover_once(wanted, want, have, low, high, tensors)
    pair, source_member, destination_member = assign(wanted, held, want, have)
    return Plan(
        tensors,
        np.array(ndims),
        wanted.tensor[want],
        low,
        high,
        pair,
        held.holder[source_member],
        wanted.holder[destination_member],
        held.slice[source_member],
        wanted.slice[destination_member],
    )


def distinct_boxes(layouts: Mapping[int, Layout], names: dict[str, int], ndims: list[int]) -> Boxes:
    """Number the tensors (extending `names`) and group equal boxes of different holders."""
    tensors: list[int] = []
    lows: list[tuple[int, ...]] = []
    shapes: list[tuple[int, ...]] = []
    holders: list[int] = []
    slices: list[int] = []
    for holder, layout in layouts.items():
        for index, piece in enumerate(layout):
            tensor = names.setdefault(piece.tensor, len(names))
            if tensor == len(ndims):
                ndims.append(len(piece.shape))
            elif ndims[tensor] != len(piece.shape):
                found = f"{ndims[tensor]} dimensions in one layout and {len(piece.shape)} in another"
                raise PlanError(f"{piece.tensor} has {found}")
            pad = DIMS - len(piece.shape)
            tensors.append(tensor)
            lows.append(piece.offset + (0,) * pad)
            shapes.append(piece.shape + (1,) * pad)
            holders.append(holder)
            slices.append(index)
    tensor_column = np.array(tensors, np.int64)
    low = np.array(lows, np.int64).reshape(-1, DIMS)
    high = low + np.array(shapes, np.int64).reshape(-1, DIMS)
    keys = np.column_stack([tensor_column, low, high])
    order = np.lexsort(keys.T[::-1])
    keys = keys[order]
    new = np.ones(len(keys), bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    first = np.flatnonzero(new)
    start = np.append(first, len(keys))
    chosen = keys[first]
    return Boxes(
        chosen[:, 0],
        chosen[:, 1 : 1 + DIMS],
        chosen[:, 1 + DIMS :],
        start,
        np.array(holders, np.int64)[order],
        np.array(slices, np.int64)[order],
    )


def candidate_pairs(wanted: np.ndarray, held: np.ndarray, tensors: int) -> tuple[np.ndarray, np.ndarray]:
    """All (wanted, held) box numbers of the same tensor; both columns of tensor numbers are sorted."""
    first = np.searchsorted(held, np.arange(tensors + 1))
    per_wanted = first[wanted + 1] - first[wanted]
    want = np.repeat(np.arange(len(wanted)), per_wanted)
    within = np.arange(len(want)) - np.repeat(np.cumsum(per_wanted) - per_wanted, per_wanted)
    return want, first[wanted][want] + within


def cover_once(
    wanted: Boxes, want: np.ndarray, have: np.ndarray, low: np.ndarray, high: np.ndarray, tensors: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Check that every wanted box is covered, and cut away what two different sources would both send."""
    volume = np.prod(wanted.high - wanted.low, axis=1)
    covered = np.bincount(want, np.prod(high - low, axis=1), minlength=len(volume)).astype(np.int64)
    if (covered > volume).any():
        twice = covered > volume
        want, have, low, high = cut_overlaps(twice, want, have, low, high)
        covered = np.bincount(want, np.prod(high - low, axis=1), minlength=len(volume)).astype(np.int64)
    missing = np.flatnonzero(covered < volume)
    if len(missing):
        box = int(missing[0])
        name = tensors[int(wanted.tensor[box])]
        span = ", ".join(f"{a}:{b}" for a, b in zip(wanted.low[box].tolist(), wanted.high[box].tolist(), strict=True))
        raise PlanError(
            f"no source holds all of {name}[{span}] ({covered[box]} of {volume[box]} elements found; "
            f"{len(missing)} boxes are incomplete): the two models differ, or a source's layout is incomplete"
        )
    return want, have, low, high


def cut_overlaps(
    twice: np.ndarray, want: np.ndarray, have: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For the few wanted boxes that several unequal sources overlap: keep of each what earlier ones do not give."""
    columns = (want.tolist(), have.tolist(), map(tuple, low.tolist()), map(tuple, high.tolist()))
    kept: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
    taken: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for w, h, a, b in zip(*columns, strict=True):
        parts = [(a, b)]
        if twice[w]:
            for box in taken.setdefault(w, []):
                parts = [rest for part in parts for rest in subtract(part, box)]
            taken[w].append((a, b))
        kept.extend((w, h, p, q) for p, q in parts)
    w_column, h_column, low_column, high_column = (np.array(c, np.int64) for c in zip(*kept, strict=True))
    return w_column, h_column, low_column, high_column


Box = tuple[tuple[int, ...], tuple[int, ...]]


def subtract(part: Box, hole: Box) -> list[Box]:
    """`part` without `hole`, as at most 2 boxes per dimension."""
    low, high = list(part[0]), list(part[1])
    if any(max(a, c) >= min(b, d) for a, b, c, d in zip(low, high, *hole, strict=True)):
        return [part]
    rest: list[Box] = []
    for d in range(len(low)):
        if low[d] < hole[0][d]:
            rest.append((tuple(low), (*high[:d], hole[0][d], *high[d + 1 :])))
            low[d] = hole[0][d]
        if hole[1][d] < high[d]:
            rest.append(((*low[:d], hole[1][d], *low[d + 1 :]), tuple(high)))
            high[d] = hole[1][d]
    return rest


def assign(wanted: Boxes, held: Boxes, want: np.ndarray, have: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One transfer for each (pair, destination), its sender drawn in turn from the holders of the source box."""
    receivers = wanted.start[want + 1] - wanted.start[want]
    pair = np.repeat(np.arange(len(want)), receivers)
    within = np.arange(len(pair)) - np.repeat(np.cumsum(receivers) - receivers, receivers)
    destination_member = wanted.start[want][pair] + within
    box = have[pair]
    replicas = held.start[box + 1] - held.start[box]
    turn = box + pair + within  # neighbours in any of the three start at different holders
    return pair, held.start[box] + turn % replicas, destination_member
