"""The replay buffer and the ledger under random schedules on a simulated clock: the bound holds, nothing is lost."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.algorithms import GenerationLimitReached
from megatron_dapo.errors import UserError
from megatron_dapo.trainers.ledger import Ledger, audit, read_ledger
from megatron_dapo.trainers.replay import SAMPLERS, Entry, ReplayBuffer, ReplayPolicy


class Simulation:
    """Prompts take random times, fail or lack a signal at random; the trainer takes random times and may crash."""

    def __init__(self, policy: ReplayPolicy, updates: int, seed: int, path, sampler: str = "oldest_first"):
        self.policy, self.updates, self.chance = policy, updates, random.Random(seed)
        self.sampler = SAMPLERS[sampler]
        self.buffer, self.ledger = ReplayBuffer(policy, self.sampler), Ledger(path)
        self.drawn = 0
        self.flying: dict[str, int] = {}  # prompt: ticks that it still takes
        self.issued: dict[str, int] = {}
        self.trained: list[tuple[str, int]] = []

    def step(self, step: int) -> None:
        self.close(self.buffer.begin(step), step)
        for _ in range(self.updates):
            while (taken := self.buffer.take(self.policy.batch_size // self.updates)) is None:
                self.send(step)
                self.tick(step)
            for uid in taken:
                assert step - self.issued[uid] + 1 <= self.policy.max_span
            self.close([(uid, "trained") for uid in taken], step)
            self.trained += [(uid, step) for uid in taken]
        self.check()

    def send(self, step: int) -> None:
        need = self.buffer.need()
        uids = [f"0-{self.drawn + i}-0" for i in range(need)]
        self.drawn += need
        self.reissue(uids, step)
        assert self.buffer.in_flight + self.buffer.ready <= self.policy.target

    def reissue(self, uids: list[str], step: int) -> None:
        self.buffer.issue(uids)
        self.ledger.issue(uids)
        for uid in uids:
            self.flying[uid] = self.chance.choice((1, 1, 2, 3, 30))
            self.issued[uid] = step

    def tick(self, step: int) -> None:
        self.flying = {uid: ticks - 1 for uid, ticks in self.flying.items()}
        for uid in [uid for uid, ticks in self.flying.items() if ticks <= 0]:
            del self.flying[uid]
            values = self.chance.choice(([0.0, 1.0], [1.0, 1.0], None))
            if outcome := self.buffer.settle(uid, values):
                self.close([(uid, outcome)], step)

    def close(self, closed, step: int) -> None:
        for uid, outcome in closed:
            self.ledger.close(uid, outcome, step)

    def check(self) -> None:
        self.ledger.flush()
        outstanding = [entry.uid for entry in self.buffer.outstanding()]
        assert audit(read_ledger(self.ledger.path), outstanding, (f"0-{i}-0" for i in range(self.drawn))) == []
        assert set(outstanding) == self.ledger.open()

    def crash_and_restore(self, saved: dict, step: int) -> None:
        self.ledger.end()
        self.ledger = Ledger(self.ledger.path)
        self.ledger.load_state_dict(saved["ledger"])
        self.drawn, self.flying = saved["drawn"], {}
        self.buffer = ReplayBuffer(self.policy, self.sampler)
        self.buffer.restore(saved["entries"])
        self.close(self.buffer.begin(step), step)
        self.reissue([entry.uid for entry in saved["entries"] if not entry.finished], step)

    def save(self) -> dict:
        return {"ledger": self.ledger.state_dict(), "drawn": self.drawn, "entries": self.buffer.outstanding()}


def possible(policy: ReplayPolicy) -> ReplayPolicy:
    return policy if policy.strategy == "drop" else replace(policy, max_span=max(policy.max_span, policy.ahead + 1))


policies = st.builds(
    ReplayPolicy,
    batch_size=st.sampled_from((2, 4, 6)),
    ahead=st.integers(0, 3),
    max_span=st.integers(1, 5),
    strategy=st.sampled_from(("drop", "wait")),
    filter=st.booleans(),
    surplus=st.sampled_from(("carry", "discard")),
).map(possible)


@settings(max_examples=150, deadline=None)
@given(
    policy=policies,
    updates=st.sampled_from((1, 2)),
    seed=st.integers(0, 10**6),
    sampler=st.sampled_from(SAMPLERS.names()),
)
def test_the_bound_holds_and_each_draw_is_accounted_for_once(tmp_path_factory, policy, updates, seed, sampler):
    sampler = "oldest_first" if policy.strategy == "wait" else sampler
    run = Simulation(policy, updates, seed, tmp_path_factory.mktemp("ledger") / "ledger.jsonl", sampler)
    saved, saved_step, step = run.save(), 0, 0
    while step < 12:
        step += 1
        run.step(step)
        if run.chance.random() < 0.3:
            saved, saved_step = run.save(), step
        if run.chance.random() < 0.3:  # twice in a row is as safe
            step = saved_step
            run.crash_and_restore(saved, step + 1)
            run.check()


@settings(max_examples=60, deadline=None)
@given(policy=policies, seed=st.integers(0, 10**6))
def test_waiting_wastes_nothing(tmp_path_factory, policy, seed):
    """Where no more batches are ahead than the bound allows, "wait" trains every group that carries a signal."""
    policy = replace(policy, strategy="wait", surplus="carry", max_span=policy.ahead + 1)
    run = Simulation(policy, 1, seed, tmp_path_factory.mktemp("ledger") / "ledger.jsonl")
    for step in range(1, 12):
        run.step(step)
    assert run.ledger.totals["stale"] == 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_oldest_go_first(tmp_path_factory, seed):
    policy = ReplayPolicy(batch_size=4, ahead=2, max_span=9)
    run = Simulation(policy, 1, seed, tmp_path_factory.mktemp("ledger") / "ledger.jsonl")
    for step in range(1, 8):
        run.step(step)
        ages = [run.issued[uid] for uid, at in run.trained if at == step]
        assert ages == sorted(ages)


def filled(**policy) -> ReplayBuffer:
    buffer = ReplayBuffer(ReplayPolicy(batch_size=4, max_span=3, **policy))
    buffer.begin(1)
    return buffer


def test_a_gap_is_refilled_exactly():
    buffer = filled(ahead=1, filter=True)
    assert buffer.need() == 8  # the step's batch and the warm-up
    buffer.issue("abcdefgh")
    assert buffer.need() == 0
    assert [buffer.settle(uid, values) for uid, values in (("a", [0, 0]), ("b", None), ("c", [0, 1]))] == [
        "filtered",
        "failed",
        None,
    ]
    assert buffer.need() == 2
    buffer.issue("ij")
    for uid in "defgh":
        buffer.settle(uid, [0, 1])
    assert buffer.take(4) == list("cdef")
    assert buffer.need() == 0  # the next batch is due in the next step
    buffer.begin(2)
    assert buffer.need() == 4


def test_waiting_forever_is_refused():
    for policy, sampler in ((dict(ahead=1, max_span=1), "oldest_first"), (dict(max_span=9), "newest_first")):
        with pytest.raises(ValueError, match="forever"):
            ReplayBuffer(ReplayPolicy(batch_size=1, strategy="wait", **policy), SAMPLERS[sampler])


def test_after_a_restart_only_what_is_missing_is_sent():
    buffer = filled(ahead=1)
    buffer.restore([Entry("a", 1, 0, finished=True), Entry("b", 1, 1)])
    buffer.issue("b")
    assert (buffer.need(), buffer.ready, buffer.in_flight) == (6, 1, 1)


def test_the_generation_limit_holds_in_every_mode():
    exhausted = dict(filter=True, max_generated=6)
    for policy, taken in ((dict(on_exhausted="train_partial"), ["a"]), (dict(on_exhausted="skip"), []), ({}, None)):
        buffer = filled(ahead=2, **exhausted, **policy)
        buffer.issue("abcdef")
        buffer.settle("a", [0, 1])
        assert buffer.take(4) is None
        for uid in "bcdef":
            buffer.settle(uid, [1, 1])
        if taken is None:
            with pytest.raises(GenerationLimitReached, match=r"1 of 4 groups after 6 prompts.*5 filtered"):
                buffer.take(4)
        else:
            assert buffer.take(4) == taken


def test_a_ledger_cannot_close_twice_and_survives_a_torn_line(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.issue(["0-1-0", "0-2-0"])
    ledger.close("0-1-0", "trained", 1)
    with pytest.raises(ValueError, match="0-1-0 cannot become 'trained'"):
        ledger.close("0-1-0", "trained", 1)
    state = ledger.state_dict()
    ledger.close("0-2-0", "trained", 2)
    ledger.flush()
    ledger.path.open("ab").write(b'{"uid": "0-3')  # a kill in the middle of a write
    assert [line["uid"] for line in read_ledger(ledger.path)] == ["0-1-0", "0-2-0"]
    again = Ledger(ledger.path)
    again.load_state_dict(state)
    assert [line["uid"] for line in read_ledger(ledger.path)] == ["0-1-0"]
    assert again.open() == {"0-2-0"}
    again.path.write_bytes(b"")
    with pytest.raises(UserError, match="copy the ledger"):
        again.load_state_dict(state)


def test_an_audit_finds_every_kind_of_mistake():
    closed = [{"uid": "a"}, {"uid": "b"}, {"uid": "b"}, {"uid": "x"}]
    assert audit(closed, ["a", "y"], ["a", "b", "c"]) == [
        "a is closed and still outstanding",
        "b was closed 2 times",
        "c was drawn and is lost",
        "x was never drawn",
        "y was never drawn",
    ]
