"""The refill loop of dynamic sampling, driven through all its endings."""

import pickle
from collections.abc import Iterator
from itertools import count

import hypothesis.strategies as st
import pytest

from megatron_dapo.algorithms import DynamicSampler, GenerationLimitReached
from tests.algorithms.cases import given

Group = tuple[int, tuple[float, ...]]
MIXED, RIGHT, WRONG = (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)


def values_of(group: Group) -> tuple[float, ...]:
    return group[1]


def groups(*kinds: tuple[float, ...], start: int = 0) -> list[Group]:
    return [(start + i, kind) for i, kind in enumerate(kinds)]


def fill(sampler: DynamicSampler, source: Iterator[Group]) -> None:
    while (prompts := sampler.need()) > 0:
        sampler.add([next(source) for _ in range(prompts)], values_of)


def test_collects_whole_groups_in_order_of_arrival() -> None:
    sampler: DynamicSampler[Group] = DynamicSampler(train_batch_size=2, gen_batch_size=3)
    assert sampler.need() == 3
    assert sampler.add(groups(RIGHT, MIXED, WRONG), values_of) == [False, True, False]
    assert sampler.need() == 3 and sampler.dropped_values() == {1.0: 1, 0.0: 1}
    sampler.add(groups(MIXED, WRONG, MIXED, start=3), values_of)
    assert sampler.need() == 0
    assert [uid for uid, _ in sampler.take()] == [1, 3]
    metrics = sampler.metrics()
    assert all(type(value) is float for value in metrics.values())
    expected = {
        "generated": 6,
        "kept": 3,
        "dropped": 3,
        "failed": 0,
        "discarded_surplus": 1,
        "taken": 2,
        "dropped_value/0": 2,
        "dropped_value/1": 1,
    }
    assert {key: metrics[f"training/filter_groups/{key}"] for key in expected} == expected
    assert metrics["train/num_gen_batches"] == 2
    assert sampler.need() == 3 and sampler.dropped_values() == {}


def test_disabled_filter_keeps_all_and_asks_for_exactly_what_is_missing() -> None:
    sampler: DynamicSampler[Group] = DynamicSampler(
        train_batch_size=4, gen_batch_size=3, enable=False, max_num_gen_batches=1
    )
    assert sampler.need() == 4
    sampler.add(groups(RIGHT, RIGHT, WRONG))
    assert sampler.need() == 1
    sampler.add(groups(RIGHT, start=3))
    assert [uid for uid, _ in sampler.take()] == [0, 1, 2, 3]
    assert sampler.metrics()["training/filter_groups/discarded_surplus"] == 0


def test_the_error_says_what_came_of_the_prompts() -> None:
    sampler: DynamicSampler[Group] = DynamicSampler(train_batch_size=4, gen_batch_size=3, max_num_gen_batches=2)
    sampler.add(groups(WRONG, MIXED, WRONG), values_of)
    sampler.add(groups(WRONG, RIGHT, start=3), values_of, failed=1)
    text = r"1 of 4 groups in 2 generation batches \(max_num_gen_batches=2\): 6 prompts generated, 1 kept, 4 dropped \(3 with all acc = 0, 1 with all acc = 1\), 1 failed.*on_exhausted"
    with pytest.raises(GenerationLimitReached, match=text):
        sampler.need()


@pytest.mark.parametrize(("on_exhausted", "taken"), [("train_partial", [1]), ("skip", [])])
@pytest.mark.parametrize("surplus", ["discard", "carry"])
def test_other_endings_at_the_limit(on_exhausted: str, taken: list[int], surplus: str) -> None:
    sampler: DynamicSampler[Group] = DynamicSampler(
        train_batch_size=2, gen_batch_size=3, max_num_gen_batches=1, on_exhausted=on_exhausted, surplus=surplus
    )
    sampler.add(groups(WRONG, MIXED, WRONG), values_of)
    assert sampler.need() == 0
    assert [uid for uid, _ in sampler.take()] == taken
    left = on_exhausted == "skip"
    sampler.add(groups(MIXED, MIXED, WRONG, start=3), values_of)
    assert [uid for uid, _ in sampler.take()] == ([1, 3] if left and surplus == "carry" else [3, 4])


def test_no_limit_goes_on() -> None:
    sampler: DynamicSampler[Group] = DynamicSampler(train_batch_size=1, gen_batch_size=2, max_num_gen_batches=0)
    for _ in range(50):
        assert sampler.need() == 2
        sampler.add(groups(WRONG, RIGHT), values_of)


def test_taking_too_early_is_an_error() -> None:
    sampler: DynamicSampler[Group] = DynamicSampler(train_batch_size=2)
    with pytest.raises(RuntimeError, match="0 of 2 groups"):
        sampler.take()
    with pytest.raises(ValueError, match="values_of"):
        sampler.add(groups(MIXED))


def test_carried_groups_come_first_and_their_age_is_counted() -> None:
    sampler: DynamicSampler[Group] = DynamicSampler(train_batch_size=2, gen_batch_size=5, surplus="carry")
    first = groups(*[MIXED] * 5)
    sampler.add(first, values_of)
    assert sampler.take() == first[:2] and sampler.ages == (0, 0)
    assert sampler.metrics()["training/filter_groups/carried_surplus"] == 3
    assert sampler.need() == 0
    taken = sampler.take()
    assert taken == first[2:4] and taken[0] is first[2] and sampler.ages == (1, 1)
    sampler.add(groups(MIXED, start=5), values_of)
    assert [uid for uid, _ in sampler.take()] == [4, 5] and sampler.ages == (2, 0)
    metrics = sampler.metrics()
    assert metrics["training/filter_groups/taken_age_max"] == 2 and metrics["training/filter_groups/taken_carried"] == 1


def test_prompts_in_flight_are_not_asked_for_twice() -> None:
    sampler: DynamicSampler[Group] = DynamicSampler(train_batch_size=4, gen_batch_size=2, max_num_gen_batches=4)
    assert [sampler.need(in_flight) for in_flight in (0, 2, 4)] == [2, 2, 0]
    sampler.add(groups(WRONG), values_of)
    assert sampler.num_gen_batches == 1
    assert sampler.need(3) == 2  # one turned out worthless
    sampler.add(groups(*[WRONG] * 5, start=1), values_of)
    assert sampler.need(2) == 0  # 6 generated and 2 in flight are the limit of 8: wait
    sampler.add(groups(MIXED, start=6), values_of, failed=1)
    with pytest.raises(GenerationLimitReached, match="1 of 4 groups"):
        sampler.need()


@given(
    st.lists(st.sampled_from([MIXED, RIGHT, WRONG]), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["discard", "carry"]),
)
def test_every_kept_group_is_taken_once_or_counted(kinds: list, train: int, gen: int, surplus: str) -> None:
    sampler: DynamicSampler[Group] = DynamicSampler(train_batch_size=train, gen_batch_size=gen, surplus=surplus)
    seen: list[Group] = []

    def source() -> Iterator[Group]:
        for i in count():
            group = (i, [*kinds, MIXED][i % (len(kinds) + 1)])
            seen.append(group)
            yield group

    prompts, taken, discarded, carried = source(), [], 0.0, 0.0
    for _ in range(4):
        fill(sampler, prompts)
        taken += sampler.take()
        discarded += sampler.metrics()["training/filter_groups/discarded_surplus"]
        carried = sampler.metrics()["training/filter_groups/carried_surplus"]
    kept = [group for group in seen if group[1] == MIXED]
    assert len(taken) == 4 * train and taken == sorted(taken)
    assert len(kept) == len(taken) + discarded + carried
    if surplus == "carry":
        assert taken == kept[: len(taken)] and discarded == 0


@given(st.integers(0, 11), st.sampled_from(["discard", "carry"]))
def test_resuming_anywhere_changes_nothing(stop: int, surplus: str) -> None:
    """Save, reload in a new sampler after any number of groups, and go on: the same batches come out."""
    stream = groups(*[WRONG, MIXED, MIXED, RIGHT, MIXED, MIXED, WRONG, MIXED, MIXED, MIXED, MIXED, MIXED])

    def run(reload_at: int | None) -> tuple[list[list[Group]], list[tuple[int, ...]], dict[str, float]]:
        sampler: DynamicSampler[Group] = DynamicSampler(train_batch_size=2, gen_batch_size=1, surplus=surplus)
        batches, ages = [], []
        for i, group in enumerate(stream):
            if i == reload_at:
                state = pickle.loads(pickle.dumps(sampler.state_dict()))
                sampler = DynamicSampler(train_batch_size=2, gen_batch_size=1, surplus=surplus)
                sampler.load_state_dict(state)
            sampler.add([group], values_of)
            if sampler.need() == 0:
                batches.append(sampler.take())
                ages.append(sampler.ages)
        return batches, ages, sampler.metrics()

    assert run(stop) == run(None)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"train_batch_size": 0}, "batch sizes"),
        ({"on_exhausted": "stop"}, "on_exhausted"),
        ({"surplus": "keep"}, "surplus"),
    ],
)
def test_bad_settings_are_named(settings: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DynamicSampler(**({"train_batch_size": 2} | settings))
