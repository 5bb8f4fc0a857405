"""The sync trainer on Ray: equal to torchrun, also across a killed rank; a second failure ends it, leaving nothing."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Line, trained
from tests.e2e.test_train import pids, processes_of, wait_for_steps
from tests.ray_nodes import nodes

pytestmark = [pytest.mark.slow, pytest.mark.long]
START_SECONDS = 500.0  # two raylets, two ranks and an engine, all starting on two busy cores


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.timeout(1500)
def test_equal_to_torchrun_across_a_restart_and_gone_after_a_second_failure(
    line: Line, two_ranks: Path, tmp_path: Path
):
    nodes()
    segments = set(os.listdir("/dev/shm"))
    process = line.start(
        tmp_path, 2, "parallel.expert=2", "trainer.runtime=ray", "trainer.total_training_steps=1000",
        "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1", "trainer.max_restarts=1", environment=nodes().environment(),
    )  # fmt: skip
    wait_for_steps(tmp_path, 1, START_SECONDS)
    first = pids("ray::RankActor")
    assert len(first) == 2
    os.kill(first[1], signal.SIGKILL)
    died = time.monotonic()
    while set(pids("ray::RankActor")) & set(first):
        assert time.monotonic() - died < 30, "a rank outlives its killed peer"
        time.sleep(0.2)
    wait_for_steps(tmp_path, len(trained(tmp_path)) + 2, START_SECONDS)
    ranks = pids("ray::RankActor")
    (engine,) = (pid for pid in pids("megatron_dapo.rollout.server") if parent(pid) in ranks)
    killed = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    output, _ = process.communicate(timeout=150)
    assert time.monotonic() - killed < 30
    assert process.returncode == 1, output
    assert "RankDied: rank" in output and "restart 1 of 1" in output and "EngineDied" in output, output
    assert "resumed after step" in output
    rows = trained(tmp_path)
    assert [next(row for row in rows if row["step"] == step) for step in (1, 2)] == trained(two_ranks)
    assert not processes_of(tmp_path) and not pids("ray::RankActor")
    assert set(os.listdir("/dev/shm")) <= segments
