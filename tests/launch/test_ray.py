"""launch/ray, really run: a job submitted to a cluster of two raylets, and what the scripts say before they start."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.launch.test_torchrun import dry_run, events

ROOT = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    found = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return found


def ray_start(*words: str) -> subprocess.Popen:
    """One raylet in the foreground; it ends with SIGTERM, and nothing of anybody else's does."""
    words = (
        *words,
        f"--dashboard-agent-listen-port={free_ports(1)[0]}",
        "--num-cpus=1",
        "--object-store-memory=100000000",
    )
    environment = {**os.environ, "PYTHONPATH": "", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[str]:
    """Of a cluster of two raylets."""
    port, board = free_ports(2)
    started = [ray_start("--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1",
                         f"--dashboard-port={board}")]  # fmt: skip
    try:
        wait_for_port(board)
        started.append(ray_start(f"--address=127.0.0.1:{port}"))
        yield f"http://127.0.0.1:{board}"
    finally:
        for raylet in reversed(started):
            raylet.terminate()
        for raylet in started:
            raylet.wait(60)


def wait_for_port(port: int, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"nothing listens on {port} after {seconds} s")


@pytest.mark.slow
def test_a_submitted_job_runs_on_two_raylets(dashboard: str, tmp_path: Path):
    working = tmp_path / "code"  # what is sent, and what the job must be running
    working.mkdir()
    for name in ("megatron_dapo", "tests", "configs"):
        (working / name).symlink_to(ROOT / name)
    runtime_env = {
        "env_vars": {"EVENTS": str(tmp_path), "RAY_NODES": "2"},
        "excludes": ["__pycache__"],
    }
    (tmp_path / "env.yaml").write_text(yaml.safe_dump(runtime_env))
    variables = {**os.environ, "RAY_ADDRESS": dashboard, "WORKING_DIR": str(working), "PYTHONPATH": str(ROOT),
                 "RUNTIME_ENV": str(tmp_path / "env.yaml"), "PYTHON": sys.executable, "MODULE": "tests.launch.ray_driver",
                 "SUBMISSION_ID": "test-job"}  # fmt: skip
    words = ["recipe=demo", f"trainer.default_local_dir={tmp_path}/run"]
    done = subprocess.run(
        [ROOT / "launch/ray/submit.sh", *words],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Job 'test-job' succeeded" in done.stdout
    seen = events(tmp_path, 0)
    assert seen[0].startswith("started world=2 nodes=2") and "trainer.runtime=ray" in seen[0], seen
    assert seen[-1] == "step 3"


def test_submit_says_what_it_will_do_or_why_not(tmp_path: Path):
    done = dry_run("ray/submit.sh", ["recipe=demo", "trainer.default_local_dir=/shared/run"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "job submit" in done.stdout and "http://127.0.0.1:8265" in done.stdout
    assert done.stdout.rstrip().endswith("trainer.default_local_dir=/shared/run trainer.runtime=ray")
    done = dry_run("ray/submit.sh", ["recipe=demo"], tmp_path)
    assert done.returncode == 2 and "absolute path" in done.stderr
    done = dry_run("ray/submit.sh", ["recipe=demo"], tmp_path, RUNTIME_ENV="none.yaml")
    assert done.returncode == 2 and "none.yaml" in done.stderr


def test_node_says_what_it_will_do(tmp_path: Path):
    done = dry_run("ray/node.sh", ["recipe=demo"], tmp_path, NNODES="2", MASTER_ADDR="node0", MAX_RESTARTS="2")
    assert done.returncode == 0, done.stderr
    assert "--head" in done.stdout and "recipe=demo trainer.runtime=ray trainer.max_restarts=2" in done.stdout
    done = dry_run("ray/node.sh", ["recipe=demo"], tmp_path, NNODES="2", NODE_RANK="1", MASTER_ADDR="node0")
    assert "--address node0:" in done.stdout and "recipe=demo" not in done.stdout
    done = dry_run("slurm/ray.sbatch", ["recipe=demo"], tmp_path, NNODES="2")
    assert done.returncode == 0 and "srun" in done.stdout and "--head" in done.stdout, done.stderr
