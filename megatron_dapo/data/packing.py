"""Who computes which sequences: equal work for every rank, and micro-batches that never exceed their token budget.

Work is not tokens. A sequence costs a·L + b·L² FLOPs (matrices, then attention), so ranks with equal tokens may differ
by the square of their longest sequence. Pure functions of lengths; rows are named by their index.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

from megatron_dapo.errors import UserError

# a and b up to a common factor: 24·h²·L and 4·h·L² FLOPs per layer give a/b = 6·h; this is h = 4096.
LINEAR_COST = 24576.0
QUADRATIC_COST = 1.0
_TRADES = 256
_EVEN_ENOUGH = 4e-4  # of the mean: below what a rank could notice


def workload(length: np.ndarray | Sequence[int], *, a: float = LINEAR_COST, b: float = QUADRATIC_COST) -> np.ndarray:
    """Cost of sequences of these lengths, a·L + b·L², in units of b."""
    tokens = np.asarray(length, dtype=np.float64)
    return a * tokens + b * tokens**2


def balance(costs: np.ndarray | Sequence[float], parts: int, equal_counts: bool = True) -> list[list[int]]:
    """Split rows into `parts` lists whose summed costs are as equal as can be found quickly.

    With `equal_counts` the lists differ by at most one row in length. Rows are dealt from the costliest down, each to a
    list that is among the lightest; then the heaviest list trades rows with the lightest while that helps.
    Raises ValueError for parts < 1 and for costs that are negative or not finite.
    """
    cost = np.asarray(costs, dtype=np.float64)
    if parts < 1:
        raise ValueError(f"cannot balance over {parts} parts; at least one is needed")
    if not (np.isfinite(cost) & (cost >= 0)).all():
        raise ValueError("costs must be finite and not negative")
    order = np.argsort(-cost, kind="stable")
    owner = _deal(cost, order, parts, most=len(cost) // parts if equal_counts else len(cost))
    by_owner = np.argsort(owner, kind="stable")
    lists = np.split(by_owner, np.cumsum(np.bincount(owner, minlength=parts))[:-1])
    _trade(cost, lists)
    return [sorted(rows.tolist()) for rows in lists]


def _deal(cost: np.ndarray, order: np.ndarray, parts: int, most: int) -> np.ndarray:
    """Longest processing time first, many lists a step: whichever lists the next row could go to get one row each.

    No list takes more than `most` rows before all have; the rows left over then go to the lightest lists.
    """
    load, count = np.zeros(parts), np.zeros(parts, dtype=np.int64)
    owner = np.empty(len(order), dtype=np.int64)
    start = 0
    while start < len(order):
        free = np.flatnonzero(count < most)
        if not len(free):
            free, most = np.arange(parts), most + 1
        free = free[np.argsort(load[free], kind="stable")]
        lightest = load[free]
        width = np.searchsorted(lightest, lightest[0] + cost[order[start]], side="right")
        rows = order[start : start + width]
        takers = free[: len(rows)]
        load[takers] += cost[rows]
        count[takers] += 1
        owner[rows] = takers
        start += len(rows)
    return owner


def _trade(cost: np.ndarray, lists: list[np.ndarray]) -> None:
    """Swap one row of the heaviest list for one of the lightest, the pair that comes nearest to closing the gap."""
    load = np.array([cost[rows].sum() for rows in lists])
    mean = load.mean()
    for _ in range(_TRADES):
        heavy, light = int(load.argmax()), int(load.argmin())
        gap = load[heavy] - load[light]
        if load[heavy] <= mean * (1 + _EVEN_ENOUGH) or not len(lists[light]):
            return
        difference = cost[lists[heavy]][:, None] - cost[lists[light]][None, :]
        i, j = np.unravel_index(np.abs(difference - gap / 2).argmin(), difference.shape)
        moved = difference[i, j]
        if not 0 < moved < gap:
            return
        lists[heavy][i], lists[light][j] = lists[light][j], lists[heavy][i]
        load[heavy] -= moved
        load[light] += moved


def pack(lengths: np.ndarray | Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill bins of `max_tokens` tokens, as few as can be found quickly.

    No bin ever exceeds `max_tokens`; ValueError names a row that cannot fit anywhere. Best-fit decreasing nearly always
    reaches the bound ceil(Σ lengths / max_tokens); where it does not, filling bins to the last token is tried too.
    """
    tokens = _checked(lengths, max_tokens)
    bins = _best_fit(tokens, max_tokens)
    if len(bins) > -(-int(tokens.sum()) // max(max_tokens, 1)):
        bins = min(bins, _fill_to_the_brim(tokens, max_tokens), key=len)
    return [sorted(rows) for rows in bins]


def _best_fit(tokens: np.ndarray, max_tokens: int) -> list[list[int]]:
    """The longest row first, each into the fullest bin that has room for it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for row in np.argsort(-tokens, kind="stable").tolist():
        length = int(tokens[row])
        place = bisect_left(room, (length, -1))
        if place == len(room):
            bins.append([row])
            insort(room, (max_tokens - length, len(bins) - 1))
            continue
        free, target = room.pop(place)
        bins[target].append(row)
        insort(room, (free - length, target))
    return bins


def _fill_to_the_brim(tokens: np.ndarray, max_tokens: int) -> list[list[int]]:
    """One bin after the other: the longest rows that fit, until one or two rows fill the rest exactly."""
    left = _ByLength(tokens)
    bins = []
    while left.lengths:
        rows, free = [], max_tokens
        while left.lengths and left.lengths[0] <= free:
            for length in left.closing(free) or (left.longest(free),):
                rows.append(left.take(length))
                free -= length
        bins.append(rows)
    return bins


class _ByLength:
    """The rows that are still to be packed, by length."""

    def __init__(self, tokens: np.ndarray):
        self.rows: dict[int, list[int]] = {}
        for row, length in enumerate(tokens.tolist()):
            self.rows.setdefault(length, []).append(row)
        self.lengths = sorted(self.rows)
        self.present = np.zeros(self.lengths[-1] + 1, dtype=bool)
        self.present[self.lengths] = True

    def take(self, length: int) -> int:
        row = self.rows[length].pop()
        if not self.rows[length]:
            self.present[length] = False
            del self.lengths[bisect_left(self.lengths, length)]
        return row

    def longest(self, free: int) -> int:
        return self.lengths[bisect_right(self.lengths, free) - 1]

    def closing(self, free: int) -> tuple[int, ...]:
        """Lengths of one row, or else two, that add up to `free` exactly; () if there are none."""
        top = self.lengths[-1]
        if free <= top and self.present[free]:
            return (free,)
        if free > 2 * top:
            return ()
        half, most = -(-free // 2), min(free, top)
        both = self.present[half : most + 1] & self.present[free - most : free - half + 1][::-1]
        for longer in (half + np.flatnonzero(both)[::-1]).tolist():
            if 2 * longer != free or len(self.rows[longer]) > 1:
                return (longer, free - longer)
        return ()


def plan_micro_batches(
    lengths: np.ndarray | Sequence[int],
    dp: int,
    max_tokens: int,
    *,
    assigned: Sequence[Sequence[int]] | None = None,
    min_micro_batches: int = 1,
    multiple_of: int = 1,
    a: float = LINEAR_COST,
    b: float = QUADRATIC_COST,
) -> list[list[list[int]]]:
    """The rows of each micro-batch of each data-parallel rank, plan[rank][micro_batch] → rows.

    No micro-batch exceeds `max_tokens`. All ranks have the same number of micro-batches, at least `min_micro_batches`
    and a multiple of `multiple_of` (for interleaved pipelines); an empty list is a micro-batch of padding. Rows are
    given to ranks by equal cost and equal counts, unless `assigned` names the rows of each rank. Within a rank the cost
    of micro-batches is evened out, and light ones stand at both ends, where a pipeline has its bubbles.

    A rank that knows only its own rows plans with dp=1, agrees with the others on the largest count, and plans again
    with that as `min_micro_batches`. Raises UserError naming a row longer than `max_tokens`, ValueError when `assigned`
    is not one list per rank.
    """
    tokens = _checked(lengths, max_tokens)
    if dp < 1 or min_micro_batches < 0 or multiple_of < 1:
        raise ValueError(f"need dp ≥ 1 and multiple_of ≥ 1, got dp={dp}, multiple_of={multiple_of}")
    cost = workload(tokens, a=a, b=b)
    if assigned is None:
        assigned = balance(cost, dp)
    elif len(assigned) != dp:
        raise ValueError(f"assigned has rows for {len(assigned)} ranks, but dp={dp}")
    ranks = [np.asarray(rows, dtype=np.int64) for rows in assigned]
    packed = [pack(tokens[rows], max_tokens) for rows in ranks]
    count = max([min_micro_batches, *map(len, packed)])
    count = -(-count // multiple_of) * multiple_of
    plan = []
    for rows, bins in zip(ranks, packed, strict=True):
        even = _even_out(tokens[rows], cost[rows], max_tokens, count)
        chosen = bins + [[] for _ in range(count - len(bins))] if even is None else even
        ascending = sorted(chosen, key=lambda local: cost[rows[local]].sum())
        plan.append([rows[local].tolist() for local in ascending[::2] + ascending[1::2][::-1]])
    return plan


def _even_out(tokens: np.ndarray, cost: np.ndarray, max_tokens: int, count: int) -> list[list[int]] | None:
    """Rows into `count` bins, the costliest first, each into the lightest with room; None when one finds no room."""
    load, room = np.zeros(count), np.full(count, max_tokens)
    bins: list[list[int]] = [[] for _ in range(count)]
    for row in np.argsort(-cost, kind="stable").tolist():
        target = int(np.where(room >= tokens[row], load, np.inf).argmin()) if count else -1
        if count == 0 or room[target] < tokens[row]:
            return None
        bins[target].append(row)
        load[target] += cost[row]
        room[target] -= tokens[row]
    return [sorted(rows) for rows in bins]


def _checked(lengths: np.ndarray | Sequence[int], max_tokens: int) -> np.ndarray:
    tokens = np.asarray(lengths, dtype=np.int64)
    if tokens.size and int(tokens.max()) > max_tokens:
        row = int(tokens.argmax())
        raise UserError(
            f"sequence {row} has {tokens[row]} tokens and fits no micro-batch of max_tokens={max_tokens}; raise "
            "max_tokens_per_micro_batch, or shorten prompts and responses"
        )
    if tokens.size and int(tokens.min()) < 0:
        raise ValueError(f"sequence {int(tokens.argmin())} has a negative length {int(tokens.min())}")
    return tokens
