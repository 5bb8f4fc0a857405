"""Ranks as Ray actors on two nodes: one world, results by rank, and every kind of failure told within seconds."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dapo.errors import UserError
from megatron_dapo.runtime import ray as runtime
from megatron_dapo.runtime.ray import Pool, RankDied, RayWorkerGroup
from tests.ray_nodes import joined
from tests.runtime.ray_worker import LightWorker
from tests.runtime.test_launcher import gone, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def driver() -> Iterator[None]:
    with joined():
        yield


def start(directory: Path, count: int) -> RayWorkerGroup:
    return RayWorkerGroup.start(Pool.take(count, {"CPU": 1.0}), LightWorker, (str(directory),), threads=3)


def test_ranks_are_one_world_in_the_order_of_nodes(driver, tmp_path: Path):
    group = start(tmp_path, 3)
    places = group.call("place")
    assert [place["RANK"] for place in places] == ["0", "1", "2"]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "0"]  # two fit on a node
    assert [place["LOCAL_WORLD_SIZE"] for place in places] == ["2", "2", "1"]
    assert {(place["WORLD_SIZE"], place["OMP_NUM_THREADS"]) for place in places} == {("3", "3")}
    assert group.call("scale", [1, 2, 3], factor=10) == [10, 20, 30]
    with pytest.raises(ValueError, match="2 shares for 3 ranks"):
        group.call("scale", [1, 2], factor=10)
    with pytest.raises(UserError, match="no such file"):  # not the two that only lost their peer
        group.call("fail", rank=2, kind="user")
    assert len(list(tmp_path.iterdir())) == 3
    group.close()
    assert not list(tmp_path.iterdir())
    for place in places:
        wait_for(lambda pid=int(place["pid"]): gone(pid))


def test_a_death_is_the_reason_and_is_noticed_while_others_work(driver, tmp_path: Path):
    group = start(tmp_path, 2)
    with pytest.raises(RankDied, match="rank 1 died during `fail`"):
        group.call("fail", rank=1, kind="death")
    os.kill(group.pids[0], 9)
    begin = time.monotonic()
    with pytest.raises(RankDied, match=r"rank [01] died during `sleep`"):
        group.call("sleep", seconds=60)
    group.close()
    assert time.monotonic() - begin < 20


def test_a_cluster_that_is_too_small_says_so(driver):
    with pytest.raises(UserError, match=r"needs 5 CPU \(it has 4\), 20 GPU \(it has 0\)"):
        Pool.take(5, {"CPU": 1.0, "GPU": 4.0})


@pytest.mark.parametrize("given", ["127.0.0.1:1", "ray://127.0.0.1:10001"])
def test_an_address_without_ray_is_one_clear_error(monkeypatch, given: str):
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(UserError, match=given):
        runtime.address()
