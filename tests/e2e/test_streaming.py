"""The streaming trainer end to end with real vLLM, Ray and TransferQueue: both modes, exactness, recovery."""

import json
import os
import signal
from pathlib import Path

import pytest

from megatron_dapo.metrics.names import undocumented
from megatron_dapo.trainers.ledger import LEDGER_FILE, audit_checkpoint, read_ledger
from tests.e2e import chaos
from tests.e2e.conftest import Line, trained
from tests.e2e.test_train import pids, processes_of, wait_for_steps
from tests.ray_nodes import nodes

pytestmark = pytest.mark.slow
ONE_RANK = ("parallel.world_size=1", "parallel.expert=1", "rollout.kv_cache_gb=0.125")


@pytest.mark.parametrize(
    "mode",
    [
        ("trainer.mode=colocate_async",),
        (
            "trainer.mode=separate_async",
            "trainer.parameter_sync_step=2",
            "actor.ppo_mini_batch_size=2",
            "rollout.engines=2",
        ),
    ],
    ids=["colocate_async", "separate_async"],
)
def test_tokens_that_outlive_pushes_and_interruptions_have_the_right_log_probs(line: Line, tmp_path: Path, mode):
    """With next to no learning rate every version is the same policy, so trainer and rollout must agree on every token."""
    steps = ("trainer.total_training_steps=3", "trainer.save_freq=3", "actor.optim.lr=1e-30")
    assert line.train(tmp_path, 1, *ONE_RANK, *mode, *steps) == 0
    rows = trained(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["training/rollout_logprob_diff_max"] for row in rows) <= 1e-4
    assert rows[-1]["training/off_policy/trajectory_staleness_worst/max"] >= 1  # a batch was generated ahead
    assert not undocumented({name for row in rows for name in row if name != "step"})
    assert audit_checkpoint(tmp_path, 3) == []
    assert [line["outcome"] for line in read_ledger(tmp_path / LEDGER_FILE)].count("trained") == 12


@pytest.mark.long
@pytest.mark.timeout(900)
def test_on_ray_an_engine_in_a_slot_of_its_own_is_replaced_when_it_dies(line: Line, tmp_path: Path):
    steps = ("trainer.total_training_steps=6", "trainer.save_freq=6", "actor.optim.lr=1e-30")
    mode = ("trainer.runtime=ray", "trainer.mode=separate_async")
    process = line.start(tmp_path, 1, *ONE_RANK, *mode, *steps, environment=nodes().environment())
    wait_for_steps(tmp_path, 1, 300)
    (engine,) = pids("megatron_dapo.rollout.server")
    os.kill(engine, signal.SIGKILL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    rows = trained(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["streaming/engine_restarts"] == 1
    assert max(row["training/rollout_logprob_diff_max"] for row in rows) <= 1e-4
    assert audit_checkpoint(tmp_path, 6) == []
    assert not processes_of(tmp_path) and not pids("ray::EngineActor")


@pytest.mark.long
def test_nothing_is_lost_when_something_is_killed(line: Line, tmp_path: Path):
    """Three of the points of docs/chaos.md; the whole list is `python -m tests.e2e.chaos`."""
    points = [
        "while saving: the ledger is written, the queue not",
        "engine while generating",
        "trainer leaves update_actor",
    ]
    code = chaos.torment(tmp_path / "run", [*line.overrides(tmp_path / "run"), *chaos.SMALL], points)
    rows = [json.loads(text) for text in (tmp_path / "run" / chaos.ROWS).read_text().splitlines()]
    assert [(row["point"], row["survived"], row.get("problems")) for row in rows] == [
        (point, True, []) for point in points
    ]
    assert code == 143  # it stopped by itself
