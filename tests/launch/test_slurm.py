"""launch/slurm/*.sbatch on a real SLURM of two nodes: each trains, is stopped, requeued and finishes."""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.slurm_cluster import Cluster, cluster, missing

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason="; ".join(missing()))]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def submit(slurm: Cluster, tmp_path: Path, words: list[str], script: str = "torchrun", **variables: str) -> str:
    """The job's number. MASTER_ADDR is given because n1 and n2 are not in this machine's DNS."""
    more = {
        "PYTHON": sys.executable, "LOG_DIR": str(tmp_path / "logs"), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "REPOSITORY": str(ROOT), "PYTHONPATH": str(ROOT), "RAY_NUM_CPUS": "1", **variables,
    }  # fmt: skip
    options = ["--parsable", "--nodes=2", "--time=20", f"--output={tmp_path}/job.log", "--export=ALL"]
    return slurm.run("sbatch", *options, str(ROOT / f"launch/slurm/{script}.sbatch"), *words, **more)


def told(slurm: Cluster, tmp_path: Path) -> str:
    """Everything that was written down, for the message of a failed assertion."""
    files = [tmp_path / "job.log", *sorted((tmp_path / "logs").glob("*.log"))]
    return "\n".join(f"--- {file}\n{file.read_text()[-4000:]}" for file in files if file.exists()) + slurm.logs()


def events(tmp_path: Path, rank: int) -> list[str]:
    file = tmp_path / f"rank-{rank}"
    return file.read_text().splitlines() if file.exists() else []


LIGHT = {"torchrun": ("tests.launch.rank", 60), "ray": ("tests.launch.ray_driver", 40)}


@pytest.mark.parametrize("script", LIGHT)
def test_a_stopped_job_goes_back_into_the_queue_and_finishes(slurm: Cluster, tmp_path: Path, script: str):
    module, steps = LIGHT[script]
    job = submit(slurm, tmp_path, ["recipe=demo"], script, MODULE=module, EVENTS=str(tmp_path), STEPS=str(steps))
    deadline = time.monotonic() + 120
    while "step 1" not in events(tmp_path, 0):
        assert time.monotonic() < deadline, told(slurm, tmp_path)
        time.sleep(0.2)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    over = slurm.wait(job, 240)
    assert (over["JobState"], over["Restarts"]) == ("COMPLETED", "1"), told(slurm, tmp_path)
    seen = events(tmp_path, 0)
    assert sum(event.startswith("started world=2") for event in seen) == 2
    assert "stopped" in seen and seen[-1] == f"step {steps}"
    log = (tmp_path / "job.log").read_text()
    assert "phase: stop requested (SIGUSR1)" in log and "phase: back into the queue" in log
    for node in (0, 1):
        phases = re.findall(r"phase: (\w+)", (tmp_path / "logs" / f"node-{node}.log").read_text())
        assert phases.count("start") == 2 and phases[-1] == "end"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("script", "steps"), [("torchrun", 8), ("ray", 3)], ids=["torchrun, requeued", "ray"])
def test_two_nodes_train_the_demo(slurm: Cluster, tmp_path: Path, script: str, steps: int):
    """The longer run is asked to stop after its first step: back in the queue, it goes on from its checkpoint."""
    from megatron_dapo.cli.demo import Demo, write_inputs
    from megatron_dapo.metrics import METRICS_FILE, read_jsonl

    demo = Demo(tmp_path / "demo")
    write_inputs(demo)
    words = [
        "recipe=demo", f"model.path={demo.init}", f"data.train_files=[{demo.data}/train.parquet]", "data.val_files=[]",
        f"trainer.default_local_dir={tmp_path}/run", f"trainer.total_training_steps={steps}", "trainer.save_freq=1",
        "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.export_hf=false",
        "algorithm.filter_groups.enable=false",
        "data.train_batch_size=4", "data.gen_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=4",
    ]  # fmt: skip
    job = submit(slurm, tmp_path, words, script, MAX_RESTARTS="0")
    metrics = tmp_path / "run" / METRICS_FILE
    if script == "torchrun":
        deadline = time.monotonic() + 400
        while not (metrics.exists() and read_jsonl(metrics)):
            assert time.monotonic() < deadline, told(slurm, tmp_path)
            time.sleep(0.1)
        slurm.run("scancel", "--batch", "--signal=USR1", job)
    over = slurm.wait(job, 700)
    assert over["JobState"] == "COMPLETED", told(slurm, tmp_path)
    assert over["Restarts"] == ("1" if script == "torchrun" else "0")
    rows = [row for row in read_jsonl(metrics) if "timing_s/step" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert (tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == str(steps)
    started = {"torchrun": "ranks, rendezvous", "ray": "phase: start, Ray at"}[script]
    assert started in (tmp_path / "logs" / "node-1.log").read_text()
