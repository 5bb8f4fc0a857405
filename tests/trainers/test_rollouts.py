"""What a streaming run tells of groups that are of no use, and where its seconds go; queue, feed and fleet are lists."""

from types import SimpleNamespace

import pytest

from megatron_dapo.algorithms import filter_value
from megatron_dapo.data.types import Group, Prompt, Score, Trajectory
from megatron_dapo.metrics import Timer, compute
from megatron_dapo.runtime import rows
from megatron_dapo.trainers import stages, streaming, sync
from megatron_dapo.trainers.feed import Settled
from megatron_dapo.trainers.replay import ReplayBuffer, ReplayPolicy
from megatron_dapo.trainers.rollouts import Rollouts


class Store(dict):
    """The queue's rows."""

    def put(self, fields, tags=None):
        for key, row in fields.items():
            self.setdefault(key, {}).update(row)

    def get(self, keys, names=None):
        return [self[key] for key in keys]

    def clear(self, keys):
        for key in keys:
            del self[key]


class Dump:
    wanted = True

    def __init__(self):
        self.told = []

    def failed(self, groups):
        self.told += [(g.prompt.uid, "failed sample") for g in groups for s in g.scores if s.status == "failed"]

    def filtered(self, groups, kept, values_of):
        self.told += [(group.prompt.uid, f"filtered {values_of(group)}") for group in groups]

    def left(self, group, fate):
        self.told.append((group.prompt.uid, fate))


def group(index: int, *accuracies: float | None) -> Group:
    """None: that sample's verifier failed."""
    prompt = Prompt(f"0-{index}-0", 0, index, 0, (1,), ({"role": "user", "content": "?"},), "math", "4")
    made = tuple(Trajectory(prompt.uid, i, (7, 8), (-1.0,) * 2, "stop", (0, 0)) for i in range(len(accuracies)))
    scores = (Score(0.0, 0.0, 0.0, status="failed") if a is None else Score(a, a, a) for a in accuracies)
    return Group(prompt, made, tuple(scores))


def rollouts_over(*groups: Group, keep_partial: bool = True) -> Rollouts:
    """All groups have been sent and have come back."""
    store, settled = Store(), []
    for one in groups:
        keys = [rows.trajectory_key(one.prompt.uid, t.sample) for t in one.trajectories]
        store.put({one.prompt.uid: rows.prompt_row(one.prompt)})
        for key, trajectory, score in zip(keys, one.trajectories, one.scores, strict=True):
            store.put({key: rows.trajectory_row(trajectory) | rows.score_row(score)})
        good = [score.acc for score in one.scores if score.status == "ok"]
        usable = good and (keep_partial or len(good) == len(keys))
        settled.append(Settled(one.prompt.uid, tuple(good) if usable else None, tuple(good), tuple(keys)))
    waiting = [settled]
    feed = SimpleNamespace(
        settled=lambda timeout: waiting.pop() if waiting else [],
        value=lambda score: filter_value(score, "acc"),
        send=lambda prompts: None,
        failed_samples=0,
    )
    ledger = SimpleNamespace(close=lambda *of: None, issue=lambda uids: None, flush=lambda: None)
    buffer = ReplayBuffer(ReplayPolicy(batch_size=1, filter=True))
    fleet = SimpleNamespace(restarts=0, busy_seconds=lambda: 1.0, newcomers=False, sweep=lambda: None)
    loader = SimpleNamespace(next=lambda count: [])
    made = Rollouts(loader, store, fleet, feed, buffer, ledger, Dump(), connect=lambda ranks, engines: ranks)
    made.begin(1)
    buffer.issue(one.prompt.uid for one in groups)
    return made


def test_what_is_told_of_a_trajectory_survives_the_queue():
    made = Trajectory("u", 0, (7, 8), (-1.0, -0.5), "stop", (3, 3), speculation=(4, 2, 2), turns=3, tool_calls=2)
    assert rows.read_trajectory(rows.trajectory_row(made)) == made


def test_groups_of_no_use_are_told_before_their_rows_go():
    good, flat, broken = group(1, 1.0, 0.0, None), group(2, 0.0, 0.0), group(3, None, None)
    made = rollouts_over(good, flat, broken)
    (uid,) = made.poll(1)
    assert [len(one.trajectories) for one in made.read([uid])] == [2]  # the sample without a score is not trained on
    assert sorted(made.dump.told) == [
        ("0-1-0", "failed sample"),
        ("0-2-0", "filtered [0.0, 0.0]"),
        ("0-3-0", "failed"),
        ("0-3-0", "failed sample"),
        ("0-3-0", "failed sample"),
    ]
    assert not made.queue
    told = compute(made.metrics(2.0, 1.0))
    counts = [told[f"training/filter_groups/{name}"] for name in ("generated", "kept", "dropped", "failed", "taken")]
    assert counts == [3, 1, 1, 1, 1]


def test_a_push_while_waiting_for_groups_is_not_waiting(monkeypatch):
    """An engine came back: its push has a stage of its own, and no second counts twice."""
    timer, inside = Timer(), []

    def push(run, rollouts):
        inside.append(dict(timer.seconds))
        rollouts.fleet.newcomers = False

    monkeypatch.setattr(streaming, "push_weights", push)
    answers = [["u"], None]
    fleet = SimpleNamespace(newcomers=True, sweep=lambda: None)
    rollouts = SimpleNamespace(poll=lambda count: answers.pop(), read=lambda uids: uids, fleet=fleet)
    assert streaming.sample_groups(SimpleNamespace(timer=timer), rollouts, 1) == ["u"]
    assert len(inside) == 1 and "gen" in inside[0]  # its stage had ended


@pytest.mark.parametrize("loop", [sync, streaming])
def test_what_came_before_the_first_step_is_in_no_step(monkeypatch, loop):
    timer, taken = Timer(), []

    def push(ranks, version):
        with timer.stage("update_weights"):
            return {}

    monkeypatch.setattr(stages, "push_weights", push)
    trainer = SimpleNamespace(val_before_train=False)
    run = SimpleNamespace(
        config=SimpleNamespace(trainer=trainer),
        timer=timer,
        ranks=SimpleNamespace(group="ranks", engines=()),
        step=0,
        total_steps=0,
        stop=False,
        reward=SimpleNamespace(
            take_counts=lambda: taken.append("counts"), take_seconds=lambda: taken.append("seconds")
        ),
        expert_load=SimpleNamespace(drop=taken.append),
        saver=SimpleNamespace(finish=lambda: None),
    )
    fleet = SimpleNamespace(
        wake=lambda *_: None,
        wait_loaded=list,
        serve=lambda engines: None,
        release=lambda: None,
        busy_seconds=lambda: taken.append("busy"),
    )
    rollouts = SimpleNamespace(fleet=fleet, ledger=SimpleNamespace(start_over=lambda: None))
    loop.fit(run) if loop is sync else loop.fit(run, rollouts)
    assert timer.seconds == {} and taken == ["counts", "seconds", "ranks"] + ["busy"] * (loop is streaming)


def test_a_push_that_had_to_be_repeated_is_counted(monkeypatch):
    attempts = [{}, stages.PushFailed(["a slice failed its checksum"], [0])]

    def push(ranks, version):
        if isinstance(answer := attempts.pop(), Exception):
            raise answer
        return answer

    monkeypatch.setattr(stages, "push_weights", push)
    monkeypatch.setattr(streaming, "replace", lambda ranks, engines: SimpleNamespace(engines=engines))
    dead = SimpleNamespace(alive=False)
    engines = [[], [dead]]
    fleet = SimpleNamespace(
        wake=lambda *_: None, wait_loaded=engines.pop, serve=lambda engines: None, release=lambda: None
    )
    run = SimpleNamespace(timer=Timer(), ranks=SimpleNamespace(engines=(dead,)), step=1)
    assert compute(streaming.push_weights(run, SimpleNamespace(fleet=fleet))) == {"push/failed": 1}
