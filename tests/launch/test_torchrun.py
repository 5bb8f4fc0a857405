"""launch/torchrun.sh, really run: one node and two nodes on this machine, restarts, requests to stop."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "launch").rglob("*.sh"), *(ROOT / "launch").rglob("*.sbatch")])
SOURCED = ("env.sh",)
CONFIG = ["recipe=demo", "trainer.total_training_steps=3"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Without SLURM's own variables, should the tests run inside a job."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    return base | {
        "PYTHON": sys.executable, "LOG_DIR": str(tmp_path / "logs"), "EVENTS": str(tmp_path), "OMP_NUM_THREADS": "1",
        "MODULE": "tests.launch.rank", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT), **more,
    }  # fmt: skip


def start(words: list[str], variables: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [ROOT / "launch" / "torchrun.sh", *words], env=variables, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.fixture
def nodes() -> Iterator[list[subprocess.Popen]]:
    """Started launchers; whatever of them still runs at the end is ended, with its ranks."""
    started: list[subprocess.Popen] = []
    yield started
    for node in started:
        if node.poll() is None:
            subprocess.run(["pkill", "-KILL", "-P", str(node.pid)], check=False)  # torchrun; its ranks notice
            node.kill()
            node.wait()


def events(tmp_path: Path, rank: int) -> list[str]:
    file = tmp_path / f"rank-{rank}"
    return file.read_text().splitlines() if file.exists() else []


def wait_for(event: str, tmp_path: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while event not in events(tmp_path, 0):
        assert time.monotonic() < deadline, f"no {event!r} in {seconds} s: {events(tmp_path, 0)}"
        time.sleep(0.1)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_syntax(script: Path):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = script.read_text()
    assert script.name in SOURCED or "set -euo pipefail" in text
    assert not re.search(r"/root/|/home/|/tmp/", text)


def dry_run(script: str, words: list[str], tmp_path: Path, **more: str) -> subprocess.CompletedProcess:
    variables = environment(tmp_path, MODULE="megatron_dapo.train", **more)
    command = ["bash", ROOT / "launch" / script, "--dry-run", *words]
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)


def test_dry_run_divides_the_world(tmp_path: Path):
    done = dry_run(
        "torchrun.sh",
        ["recipe=dapo_qwen2_5_32b", "trainer.experiment_name=a b"],
        tmp_path,
        NNODES="16",
        NODE_RANK="3",
        MASTER_ADDR="node0",
    )
    assert done.returncode == 0, done.stderr
    assert "--nnodes 16 --nproc-per-node 8" in done.stdout and "--rdzv-endpoint node0:" in done.stdout
    assert (
        "is_host=0" in done.stdout
        and "-m megatron_dapo.train recipe=dapo_qwen2_5_32b trainer.experiment_name=a\\ b" in done.stdout
    )
    assert not (tmp_path / "logs").exists()


def test_the_configuration_is_checked_before_anything_starts(tmp_path: Path):
    done = dry_run("torchrun.sh", ["recipe=demo", "rollout.nn=2"], tmp_path)
    assert done.returncode == 2 and "rollout.nn" in done.stderr and done.stdout == ""
    done = dry_run("torchrun.sh", ["recipe=dapo_qwen2_5_32b"], tmp_path, NNODES="3")
    assert done.returncode == 2 and "does not divide over NNODES=3" in done.stderr


def test_a_file_of_ones_own(tmp_path: Path):
    (tmp_path / "my.sh").write_text("NNODES=2\nNPROC_PER_NODE=1\nLOCAL_ADDR=10.0.0.1\n")
    done = dry_run("torchrun.sh", ["recipe=demo"], tmp_path, LAUNCH_ENV=str(tmp_path / "my.sh"))
    assert "--nnodes 2 --nproc-per-node 1" in done.stdout and "--local-addr 10.0.0.1" in done.stdout


def test_sbatch_dry_run_shows_every_node(tmp_path: Path):
    done = dry_run("slurm/torchrun.sbatch", ["recipe=demo"], tmp_path, NNODES="2", CONTAINER_IMAGE="image.sqsh")
    assert done.returncode == 0, done.stderr
    assert "srun" in done.stdout and "--container-image=image.sqsh" in done.stdout
    assert "is_host=1" in done.stdout and "is_host=0" in done.stdout
    done = dry_run("slurm/torchrun.sbatch", ["recipe=none"], tmp_path)
    assert done.returncode == 2


def test_the_configuration_says_how_often_to_restart(tmp_path: Path, nodes: list):
    variables = environment(tmp_path, NPROC_PER_NODE="1", FAIL_FIRST="1")
    nodes.append(start([*CONFIG, "trainer.max_restarts=1"], variables))
    output = nodes[0].communicate(timeout=180)[0]
    assert nodes[0].returncode == 0 and "restart 1 of 1" in output, output


def test_two_nodes_are_one_world_and_log_apart(tmp_path: Path, nodes: list):
    variables = environment(tmp_path, NNODES="2", NPROC_PER_NODE="1")
    nodes += [start(CONFIG, variables | {"NODE_RANK": str(node)}) for node in (0, 1)]
    output = [node.communicate(timeout=180)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], output
    assert events(tmp_path, 0)[0] == f"started world=2 restart=0 words={' '.join(CONFIG)}"
    assert events(tmp_path, 0)[-1] == "step 3" and events(tmp_path, 1)
    for node in (0, 1):
        log = (tmp_path / "logs" / f"node-{node}.log").read_text()
        phases = re.findall(r"=== \S+ node (\d) \(\S+\) phase: (\w+)", log)
        assert phases[0] == (str(node), "start") and phases[-1] == (str(node), "end")


def test_a_failed_rank_restarts_the_world(tmp_path: Path, nodes: list):
    nodes.append(start(CONFIG, environment(tmp_path, NPROC_PER_NODE="2", FAIL_FIRST="1", MAX_RESTARTS="1")))
    output = nodes[0].communicate(timeout=180)[0]
    assert nodes[0].returncode == 0, output
    started = [event.split()[2] for event in events(tmp_path, 0) if event.startswith("started")]
    assert started == ["restart=0", "restart=1"]
    assert "note: trainer.save_freq" not in output  # the demo saves


def test_what_the_user_must_mend_is_not_restarted(tmp_path: Path, nodes: list):
    nodes.append(start(CONFIG, environment(tmp_path, NPROC_PER_NODE="2", FAIL_FIRST="user", MAX_RESTARTS="2")))
    output = nodes[0].communicate(timeout=180)[0]
    assert nodes[0].returncode == 2 and "restart" not in output, output
    assert output.count("parallel.tensor=3: use 2") == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGUSR1, "file"])
def test_a_request_to_stop_reaches_rank_zero_once(how, tmp_path: Path, nodes: list):
    nodes.append(start(CONFIG, environment(tmp_path, NPROC_PER_NODE="2", STEPS="1000")))
    wait_for("step 1", tmp_path)
    if how == "file":
        (tmp_path / "logs" / "stop").touch()
    else:
        nodes[0].send_signal(how)
        nodes[0].send_signal(how)  # twice by mistake: still a clean end
    output = nodes[0].communicate(timeout=120)[0]
    assert nodes[0].returncode == 143, output
    assert events(tmp_path, 0)[-1] == "stopped" and "phase: stop requested" in output and "restart" not in output


def test_a_request_before_rank_zero_listens_is_not_lost(tmp_path: Path, nodes: list):
    nodes.append(start(CONFIG, environment(tmp_path, NPROC_PER_NODE="1", STEPS="1000")))
    log, deadline = tmp_path / "logs" / "node-0.log", time.monotonic() + 120
    while not (log.exists() and "phase: start" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # the traps stand, the rank does not
    nodes[0].send_signal(signal.SIGTERM)
    output = nodes[0].communicate(timeout=120)[0]
    assert nodes[0].returncode == 143 and events(tmp_path, 0)[-1] == "stopped", output
