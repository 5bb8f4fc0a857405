"""Balancing and packing: every row exactly once, hard bounds held, and the quality that is promised."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from megatron_dapo.data.packing import balance, pack, plan_micro_batches, workload
from megatron_dapo.errors import UserError

quick = settings(max_examples=60, deadline=None, derandomize=True)
LENGTHS = st.lists(st.integers(0, 100), max_size=40)


def lognormal(seed: int, sigma: float = 1.0, rows: int = 8192) -> np.ndarray:
    """Response lengths as in long-chain reasoning: a median of 665 tokens and a tail cut at 20480."""
    return np.random.default_rng(seed).lognormal(6.5, sigma, rows).clip(16, 20480).astype(int)


def flat(lists: list[list[int]]) -> list[int]:
    return sorted(row for rows in lists for row in rows)


def test_workload_is_flops_not_tokens() -> None:
    assert workload([7, 1, 3, 9, 4, 6, 2, 8]).tolist() == [172081, 24577, 73737, 221265, 98320, 147492, 49156, 196672]
    assert workload(10, a=2.0, b=3.0) == 320.0
    assert workload([2000]) > 2 * workload([1000])


@quick
@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_balance_is_a_partition_with_equal_counts(lengths: list[int], parts: int, equal: bool) -> None:
    lists = balance(workload(lengths), parts, equal)
    assert len(lists) == parts and flat(lists) == list(range(len(lengths)))
    assert lists == balance(workload(lengths), parts, equal)
    if equal:
        counts = [len(rows) for rows in lists]
        assert max(counts) - min(counts) <= 1


@quick
@given(st.lists(st.integers(1, 50), min_size=1, max_size=24), st.integers(1, 5))
def test_free_balance_is_within_the_bound_of_longest_first(costs: list[int], parts: int) -> None:
    """LPT is within 4/3 of the optimum, which is at least the mean and the largest cost; trading only improves it."""
    loads = [sum(costs[row] for row in rows) for rows in balance(costs, parts, equal_counts=False)]
    assert max(loads) <= 4 / 3 * max(
        sum(costs) / parts, max(costs), sum(sorted(costs)[-parts - 1 :][:2]) if len(costs) > parts else 0
    )


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("equal", [True, False])
def test_balance_of_a_training_batch(sigma: float, equal: bool) -> None:
    for seed in range(3):
        costs = workload(lognormal(seed, sigma))
        lists = balance(costs, 128, equal)
        loads = np.array([costs[rows].sum() for rows in lists])
        assert loads.max() / loads.mean() <= 1.0005
        assert not equal or {len(rows) for rows in lists} == {64}


def test_uneven_counts_are_balanced_too() -> None:
    costs = workload(lognormal(0, rows=8200))
    lists = balance(costs, 128)
    loads = np.array([costs[rows].sum() for rows in lists])
    assert {len(rows) for rows in lists} == {64, 65} and loads.max() / loads.mean() <= 1.001


@quick
@given(LENGTHS, st.integers(100, 300))
def test_pack_is_a_partition_within_the_bound(lengths: list[int], max_tokens: int) -> None:
    bins = pack(lengths, max_tokens)
    assert flat(bins) == list(range(len(lengths))) and all(bins)
    sizes = [sum(lengths[row] for row in rows) for rows in bins]
    assert all(size <= max_tokens for size in sizes)
    assert len(bins) <= max(
        1, -(-11 * sum(lengths) // (9 * max_tokens)) + sum(length > max_tokens // 2 for length in lengths) + 1
    )


@pytest.mark.parametrize("max_tokens", [20480, 32768, 65536])
@pytest.mark.parametrize("seed", [0, 2])
def test_pack_reaches_the_lower_bound(seed: int, max_tokens: int) -> None:
    lengths = lognormal(seed)
    bound = -(-int(lengths.sum()) // max_tokens)
    assert len(pack(lengths, max_tokens)) <= 1.001 * bound


def test_rows_that_fit_nowhere_are_named() -> None:
    for call in (lambda: pack([3, 9, 4], 8), lambda: plan_micro_batches([3, 9, 4], 1, 8)):
        with pytest.raises(UserError, match=r"sequence 1 has 9 tokens.*max_tokens=8"):
            call()
    with pytest.raises(ValueError, match="negative length -1"):
        pack([3, -1], 8)


@pytest.mark.parametrize("lengths", [[7] * 8, [8] * 5, [5, 5, 5, 3, 3, 3], [1] * 30])
def test_the_bound_is_hard_where_counting_tokens_is_not_enough(lengths: list[int]) -> None:
    """Eight sevens do not fit seven bins of 8, though 56 tokens would."""
    (plan,) = plan_micro_batches(lengths, 1, 8)
    assert all(sum(lengths[row] for row in rows) <= 8 for rows in plan)


@quick
@given(
    LENGTHS, st.integers(1, 5), st.integers(100, 250), st.integers(1, 4), st.integers(0, 7), st.booleans(), st.randoms()
)
def test_plan_holds_its_promises(
    lengths: list[int], dp: int, max_tokens: int, multiple: int, least: int, given_rows: bool, random
) -> None:
    assigned: list[list[int]] | None = None
    if given_rows:
        assigned = [[] for _ in range(dp)]
        for row in range(len(lengths)):
            assigned[random.randrange(dp)].append(row)
    plan = plan_micro_batches(lengths, dp, max_tokens, assigned=assigned, min_micro_batches=least, multiple_of=multiple)
    (count,) = {len(rank) for rank in plan}
    assert len(plan) == dp and count >= least and count % multiple == 0
    assert flat([rows for rank in plan for rows in rank]) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= max_tokens for rank in plan for rows in rank)
    if assigned is not None:
        assert [flat(rank) for rank in plan] == [sorted(rows) for rows in assigned]
    else:
        sizes = [sum(len(rows) for rows in rank) for rank in plan]
        assert max(sizes) - min(sizes) <= 1


def test_plan_is_even_and_has_light_micro_batches_at_both_ends() -> None:
    lengths = lognormal(1, rows=1024)
    plan = plan_micro_batches(lengths, 4, 32768)
    costs = np.array([[workload(lengths[rows]).sum() for rows in rank] for rank in plan])
    assert (costs.max(axis=1) / costs.mean(axis=1) < 1.2).all()
    for rank in costs:
        top = int(rank.argmax())
        assert (np.diff(rank[: top + 1]) >= 0).all() and (np.diff(rank[top:]) <= 0).all()


def test_ranks_that_know_only_their_rows_agree_on_a_count() -> None:
    mine, theirs = [60, 60, 60], [10, 10]
    alone = [plan_micro_batches(lengths, 1, 64)[0] for lengths in (mine, theirs)]
    count = max(map(len, alone))
    again = [plan_micro_batches(lengths, 1, 64, min_micro_batches=count)[0] for lengths in (mine, theirs)]
    assert [len(rank) for rank in again] == [3, 3]
    assert sum(not rows for rows in again[1]) == 1  # a micro-batch of padding


def test_nothing_to_plan() -> None:
    assert plan_micro_batches([], 2, 8, min_micro_batches=0) == [[], []]
    assert plan_micro_batches([], 2, 8, min_micro_batches=1, multiple_of=2) == [[[], []], [[], []]]
    assert pack([], 8) == [] and balance([], 3) == [[], [], []]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="0 parts"):
        balance([1.0], 0)
    with pytest.raises(ValueError, match="finite"):
        balance([float("nan")], 1)
    with pytest.raises(ValueError, match="2 ranks, but dp=3"):
        plan_micro_batches([1, 2], 3, 8, assigned=[[0], [1]])
    with pytest.raises(ValueError, match="dp=0"):
        plan_micro_batches([1], 0, 8)
