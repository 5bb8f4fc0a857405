"""TransferQueue as our data plane: rows come back as they went in, snapshots are small, a dead unit is an error soon."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import psutil
import pytest
import ray

from megatron_dapo.data.types import Group, Prompt, Score, Trajectory
from megatron_dapo.runtime import rows
from megatron_dapo.runtime.queue import Queue, QueueError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running_queue() -> Iterator[Queue]:
    ray.init("local", num_cpus=4, object_store_memory=100 * 2**20, include_dashboard=False, logging_level="ERROR")
    queue = Queue.open(storage_units=2)
    yield queue
    queue.close()
    ray.shutdown()


@pytest.fixture
def queue(running_queue: Queue) -> Queue:
    """Empty."""
    running_queue.clear(running_queue.tags())
    return running_queue


def group(index: int, samples: int = 3, length: int = 5) -> Group:
    uid = f"0-{index}-0"
    prompt = Prompt(
        uid, 0, index, 0, tuple(range(3 + index)), ({"role": "user", "content": "2+2"},), "math", "4", {"index": index}
    )
    made = []
    for s in range(samples):
        ids = tuple(range(length + s))
        made.append(Trajectory(uid, s, ids, tuple(-0.5 * i for i in ids), "stop", tuple(3 + i // 4 for i in ids)))
    tool = replace(made[0], response_mask=(1, 0) * (length // 2) + (1,) * (length % 2) or None)
    routed = replace(made[1], routed_experts=np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    scores = tuple(Score(0.1 * s, 1.0, 0.0, {"pred": str(s)}) for s in range(samples))
    return Group(prompt, (tool, routed, *made[2:]), scores)


def put(queue: Queue, one: Group, status: str, step: int = 1) -> list[str]:
    uid = one.prompt.uid
    keys = [rows.trajectory_key(uid, t.sample) for t in one.trajectories]
    queue.put({uid: rows.prompt_row(one.prompt)}, {uid: rows.prompt_tags(step, one.prompt.index)})
    written = zip(keys, one.trajectories, strict=True)
    queue.put(
        {k: rows.trajectory_row(t) for k, t in written},
        {k: rows.trajectory_tags(one.prompt, t) for k, t in zip(keys, one.trajectories, strict=True)},
    )
    queue.put({k: rows.score_row(s) for k, s in zip(keys, one.scores, strict=True)})
    queue.mark({uid: {"status": status}})
    return keys


def test_groups_come_back_as_they_went_in(queue: Queue):
    groups = [group(i) for i in range(3)] + [group(7, length=0)]  # an empty response, too
    keys = {g.prompt.uid: put(queue, g, rows.FINISHED) for g in groups}
    again = rows.read_groups(queue, list(keys), keys)
    for ours, theirs in zip(again, groups, strict=True):
        assert ours.prompt == theirs.prompt and ours.scores == theirs.scores
        for a, b in zip(ours.trajectories, theirs.trajectories, strict=True):
            assert np.array_equal(a.routed_experts, b.routed_experts) if b.routed_experts is not None else a == b
    tags = queue.tags()["0-1-0_2"]
    assert (tags["min_version"], tags["max_version"], tags["response_length"], tags["uid"]) == (3, 4, 7, "0-1-0")
    assert rows.rows_of(queue.tags()) == keys
    queue.clear([*keys, *(key for of in keys.values() for key in of)])
    assert queue.tags() == {}


def test_a_snapshot_is_as_large_as_its_rows_and_restores_them(queue: Queue, tmp_path):
    big = group(1, samples=4, length=5000)
    put(queue, big, rows.FINISHED)
    for i in range(2, 40):
        put(queue, group(i, length=5000), rows.FINISHED)
    wanted = ["0-1-0", *(f"0-1-0_{s}" for s in range(4))]
    queue.snapshot(tmp_path / "queue.pt", lambda tags: wanted)
    payload = 4 * 5002 * (4 + 4 + 1 + 4)
    assert payload < (tmp_path / "queue.pt").stat().st_size < 1.2 * payload  # the package's own: 60 times that
    before = {key: queue.tags()[key] for key in wanted}
    queue.clear(queue.tags())
    queue.restore(tmp_path / "queue.pt")
    assert queue.tags() == before
    again = rows.read_groups(queue, ["0-1-0"], {"0-1-0": wanted[1:]})[0]
    assert again.scores == big.scores
    assert [t.response_ids for t in again.trajectories] == [t.response_ids for t in big.trajectories]


def test_what_was_under_way_starts_anew_however_often(queue: Queue):
    for index, status in (
        (1, rows.FINISHED),
        (2, rows.RUNNING),
        (3, rows.PENDING),
        (12, rows.RUNNING),
        (4, rows.FAILURE),
    ):
        put(queue, group(index), status)
    for step in (7, 8):
        sent = rows.reissue(queue, step)
        assert [prompt.uid for prompt in sent] == ["0-2-0", "0-3-0", "0-12-0"]
        assert sent[0] == group(2).prompt
        tags = queue.tags()
        assert {tags[p.uid]["status"] for p in sent} == {rows.PENDING}
        assert {tags[p.uid]["global_steps"] for p in sent} == {step}
        assert set(rows.rows_of(tags)) == {"0-1-0", "0-4-0"}  # "0-1-0" is no prefix of "0-12-0"
        assert tags["0-1-0"]["global_steps"] == 1


def test_zz_a_dead_storage_unit_is_an_error_within_30_seconds(queue: Queue):
    """The last of the module: the queue is of no use afterwards."""
    put(queue, group(1), rows.FINISHED)
    pids = storage_processes()
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(QueueError, match=r"storage unit|gone"):
        queue.get(["0-1-0_0", "0-1-0_1", "0-1-0_2"], ["responses"])
    assert time.monotonic() - start < 30


def storage_processes() -> list[int]:
    """Of our own Ray."""
    family = psutil.Process().children(recursive=True)
    return [process.pid for process in family if "SimpleStorageUnit" in " ".join(process.cmdline())]
