"""Who sends which box to whom: the intersections of two sets of layouts, in columns: a million transfers are cheap.

Every destination receives each element it stores exactly once and nothing else; holders of the same box take turns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from megatron_dapo.errors import UserError
from megatron_dapo.models.slices import Layout

DIMS = 3  # boxes are padded with [0, 1) to this many dimensions


class PlanError(UserError, ValueError):
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
    """Distinct boxes of many holders, sorted by tensor. Box i is held by members `start[i] : start[i + 1]`."""

    tensor: np.ndarray  # [boxes]
    low: np.ndarray  # [boxes, DIMS]
    high: np.ndarray
    start: np.ndarray  # [boxes + 1]
    holder: np.ndarray  # [members]
    slice: np.ndarray  # [members] index in the holder's layout

    @property
    def members(self) -> np.ndarray:
        """How many holders each box has."""
        return np.diff(self.start)


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
    """Match what destinations store with what sources hold. Raises PlanError naming a tensor that cannot be served.

    Holders that share one layout object are looked at once: replicas cost nothing.
    """
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
    pair, source_member, destination_member = assign(wanted, held, want, have, low, high)
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
    holders: dict[int, list[int]] = {}
    unique: dict[int, Layout] = {}
    for holder, layout in layouts.items():
        holders.setdefault(id(layout), []).append(holder)
        unique[id(layout)] = layout
    groups = list(holders.values())
    columns = [layout_columns(layout, names, ndims) for layout in unique.values()]
    keys = np.concatenate([np.empty((0, 1 + 2 * DIMS), np.int64), *columns])
    order = sort_rows(keys)
    keys = keys[order]
    group = np.repeat(np.arange(len(groups), dtype=np.int32), [len(c) for c in columns])[order]
    index = position_in_run(np.array([len(c) for c in columns], np.int32))[order]
    new = np.ones(len(keys), bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    size = np.array([len(g) for g in groups], np.int32)
    copies = size[group]
    ends = np.append(np.int32(0), np.cumsum(copies, dtype=np.int32))
    first = (np.cumsum(size) - size).astype(np.int32)
    member = np.repeat(first[group] - ends[:-1], copies) + np.arange(ends[-1], dtype=np.int32)
    return Boxes(
        keys[new, 0],
        keys[new, 1 : 1 + DIMS],
        keys[new, 1 + DIMS :],
        ends[np.append(np.flatnonzero(new), len(keys))],
        np.array([h for g in groups for h in g], np.int32)[member],
        np.repeat(index, copies),
    )


def layout_columns(layout: Layout, names: dict[str, int], ndims: list[int]) -> np.ndarray:
    """One row (tensor, low, high) per slice of a layout."""
    tensor = np.array([names.setdefault(piece.tensor, len(names)) for piece in layout], np.int64)
    dims = np.array([len(piece.shape) for piece in layout], np.int64)
    ndims.extend([0] * (len(names) - len(ndims)))
    known = np.array(ndims, np.int64)
    known[tensor] = np.where(known[tensor] == 0, dims, known[tensor])
    wrong = np.flatnonzero(known[tensor] != dims)
    if len(wrong):
        name = layout[int(wrong[0])].tensor
        raise PlanError(f"{name} has {known[names[name]]} dimensions in one layout and {dims[wrong[0]]} in another")
    ndims[:] = known.tolist()
    columns = np.zeros((len(layout), 1 + 2 * DIMS), np.int64)
    columns[:, 0] = tensor
    columns[:, 1 + DIMS :] = 1
    real = np.arange(DIMS) < dims[:, None]
    low, high = columns[:, 1 : 1 + DIMS], columns[:, 1 + DIMS :]
    low[real] = np.fromiter(chain.from_iterable([piece.offset for piece in layout]), np.int64)
    high[real] = np.fromiter(chain.from_iterable([piece.shape for piece in layout]), np.int64)
    high += low
    return columns


def sort_rows(keys: np.ndarray) -> np.ndarray:
    """An order that puts rows of the same tensor together, and among them equal rows.

    Sorting by a hash of the box is much quicker than by its columns; should two boxes of a tensor share one, the
    columns decide after all.
    """
    mix = np.random.default_rng(0).integers(1, 2**62, keys.shape[1] - 1) | 1
    code = (keys[:, 0] << 40) | ((keys[:, 1:] @ mix) >> 23 & (2**40 - 1))
    order = np.argsort(code, kind="stable")
    same_code = np.diff(code[order]) == 0
    same_row = (np.diff(keys[order], axis=0) == 0).all(axis=1)
    return order if (same_code == same_row).all() else np.lexsort(keys.T[::-1])


def candidate_pairs(wanted: np.ndarray, held: np.ndarray, tensors: int) -> tuple[np.ndarray, np.ndarray]:
    """All (wanted, held) box numbers of the same tensor; both columns of tensor numbers are sorted."""
    first = np.searchsorted(held, np.arange(tensors + 1))
    per_wanted = first[wanted + 1] - first[wanted]
    want = np.repeat(np.arange(len(wanted)), per_wanted)
    return want, first[wanted][want] + position_in_run(per_wanted)


def position_in_run(lengths: np.ndarray) -> np.ndarray:
    """0, 1, … for every run, one after another."""
    ends = np.cumsum(lengths, dtype=lengths.dtype)
    return np.arange(ends[-1] if len(ends) else 0, dtype=lengths.dtype) - np.repeat(ends - lengths, lengths)


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


def assign(
    wanted: Boxes, held: Boxes, want: np.ndarray, have: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One transfer for each (pair, destination): the pair, the member that sends and the member that receives.

    All transfers of one set of replicas are dealt to them like cards, the large ones first, so that their loads differ
    by at most one transfer.
    """
    deck = replica_sets(held)[have]
    volume = np.prod(high - low, axis=1)
    order = np.lexsort((-volume, deck)).astype(np.int32)
    receivers = wanted.members[want[order]]
    changes = np.flatnonzero(np.diff(deck[order], prepend=-1))
    card = position_in_run(np.add.reduceat(receivers, changes) if len(changes) else receivers)
    holders = np.repeat(held.members[have[order]], receivers)
    source = np.repeat(held.start[have[order]], receivers) + card % holders
    destination = np.repeat(wanted.start[want[order]], receivers) + position_in_run(receivers)
    return np.repeat(order, receivers), source, destination


def replica_sets(held: Boxes) -> np.ndarray:
    """A number for each box, equal for boxes with the same holders in the same order."""
    mixed = np.random.default_rng(0).integers(1, 2**62, int(held.holder.max(initial=0)) + 1)[held.holder]
    place = np.arange(len(mixed)) - np.repeat(held.start[:-1], held.members)
    sums = np.add.reduceat(mixed * (2 * place + 1), held.start[:-1]) if len(mixed) else mixed
    return np.unique(sums, return_inverse=True)[1]
