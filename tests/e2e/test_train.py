"""The sync trainer end to end with real vLLM: layouts agree, runs repeat, resumption is exact, every way out is clean."""

import os
import signal
import time
from pathlib import Path

import pytest

from megatron_dapo.metrics import read_jsonl
from megatron_dapo.metrics.names import undocumented
from tests.e2e.conftest import Line, read_json, trained

pytestmark = pytest.mark.slow
FILTER_AFTER_KL = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=seq_final_reward",
    "algorithm.use_kl_in_reward=true",
)
OLD_PASS = "algorithm.rollout_correction.bypass_mode=false"  # whose routing R2 replays
ONE_RANK = ("parallel.world_size=1", "parallel.expert=1")


@pytest.fixture(scope="module")
def reference(line: Line, tmp_path_factory) -> Path:
    """Four uninterrupted steps on one rank, exported at the end."""
    directory = tmp_path_factory.mktemp("reference")
    assert line.train(directory, 1, *ONE_RANK, "trainer.total_training_steps=4", "trainer.export_hf=true") == 0
    return directory


def test_trainer_and_rollout_agree_after_every_push(reference: Path):
    steps = trained(reference)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert max(row["training/rollout_logprob_diff_max"] for row in steps) <= 1e-4


def test_the_export_is_the_trained_model(reference: Path):
    assert read_json(reference / "export_check.json")["max_logit_diff"] <= 1e-4


def test_every_metric_is_documented(reference: Path):
    assert not undocumented({name for row in trained(reference) for name in row if name != "step"})


def test_expert_load_counts_every_token_and_stages_tell_their_speed(reference: Path):
    """Four prompts of four responses; four mixture layers choose two experts; a last token is never fed through."""
    for row in read_jsonl(reference / "metrics.jsonl"):
        sampled = round(row["response_length/mean"] * 16)
        assert row["rollout/moe/routed_expert_assignments"] == (sampled - 16) * 4 * 2
        assert row["perf/tflops/update_actor"] > 0 and row["verifier/count/scored"] == 16
    assert [row["step"] for row in read_jsonl(reference / "moe.jsonl") if row["source"] == "rollout"] == [1, 4]


def test_expert_parallel_ranks_train_as_one_does(reference: Path, two_ranks: Path):
    assert_agree(two_ranks, reference)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            ("parallel.world_size=2", "parallel.expert=1", "parallel.tensor=2", "model.router_replay=R2", OLD_PASS),
            marks=pytest.mark.long,
        ),
        ("parallel.world_size=2", "parallel.expert=1", "parallel.pipeline=2", "model.router_replay=R3"),
    ],
    ids=["tensor 2, replay R2", "pipeline 2, replay R3"],
)
def test_a_layout_trains_as_one_rank_does(line: Line, reference: Path, tmp_path: Path, layout):
    assert line.train(tmp_path, 2, *layout, "trainer.total_training_steps=2") == 0
    assert_agree(tmp_path, reference)


def assert_agree(directory: Path, reference: Path) -> None:
    """Sampling is chaotic, so rounding may at some step flip a token; the first step's numbers must agree closely."""
    ours, theirs = trained(directory)[0], trained(reference)[0]
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy", "response_length/mean", "critic/score/mean"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    assert max(row["training/rollout_logprob_diff_max"] for row in trained(directory)) <= 1e-4


def test_a_resumed_run_equals_an_uninterrupted_one_and_both_repeat(line: Line, reference: Path, tmp_path: Path):
    save = ("trainer.save_freq=2", "trainer.max_ckpt_to_keep=1")
    assert line.train(tmp_path, 1, *ONE_RANK, "trainer.total_training_steps=2", "trainer.async_save=true", *save) == 0
    assert line.train(tmp_path, 1, *ONE_RANK, "trainer.total_training_steps=4", *save) == 0
    assert trained(tmp_path) == trained(reference)
    assert [path.name for path in (tmp_path / "checkpoints").glob("global_step_*")] == ["global_step_4"]


def test_ctrl_c_saves_and_leaves_nothing_behind(line: Line, tmp_path: Path):
    segments = set(os.listdir("/dev/shm"))
    process = line.start(tmp_path, 2, "trainer.total_training_steps=1000")
    wait_for_steps(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 130, output
    assert "Warning" not in output and "\r" not in output, output  # nothing but what the run has to say
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
    assert not processes_of(tmp_path)
    assert set(os.listdir("/dev/shm")) <= segments


def test_a_dying_engine_ends_the_run_with_one_reason(line: Line, tmp_path: Path):
    process = line.start(tmp_path, 2, "trainer.total_training_steps=1000", *FILTER_AFTER_KL)
    wait_for_steps(tmp_path, 1)
    assert trained(tmp_path)[0]["training/filter_groups/kept"] >= 4  # random responses differ in length, so in KL
    engine = next(pid for pid, command in children(process.pid) if "rollout.server" in command)
    killed = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    output, _ = process.communicate(timeout=150)
    assert time.monotonic() - killed < 30
    assert process.returncode not in (0, None)
    assert output.count("EngineDied") >= 1
    assert output.count("Traceback (most recent call last)") <= 2  # the reason, perhaps with its cause
    assert not processes_of(tmp_path)


def wait_for_steps(directory: Path, steps: int, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while len(trained(directory) if (directory / "metrics.jsonl").exists() else []) < steps:
        assert time.monotonic() < deadline, f"no {steps} steps in {seconds:.0f} s"
        time.sleep(0.2)


def processes_of(directory: Path) -> list[str]:
    """Commands still running that name the run directory."""
    return [command for _, command in all_processes() if str(directory) in command and "pytest" not in command]


def pids(name: str) -> list[int]:
    """Processes whose command contains this."""
    return sorted(pid for pid, command in all_processes() if name in command)


def all_processes() -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def children(pid: int) -> list[tuple[int, str]]:
    """All descendants of a process."""
    parents = {}
    for child, command in all_processes():
        try:
            parents[child] = (int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[1]), command)
        except (FileNotFoundError, ProcessLookupError):
            continue
    family, found = {pid}, []
    while grown := [c for c, (parent, _) in parents.items() if parent in family and c not in family]:
        family.update(grown)
        found += [(c, parents[c][1]) for c in grown]
    return found
