"""A step's generations on disk and back on the screen: every trajectory with its advantage and its fate."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from megatron_dapo.cli.main import main
from megatron_dapo.config import Config
from megatron_dapo.data.arithmetic import Arithmetic, write_arithmetic
from megatron_dapo.data.tokenizer import file_texts, train_tokenizer
from megatron_dapo.data.types import Group, Prompt, Score, Trajectory
from megatron_dapo.report import read_run
from megatron_dapo.trainers.dump import RolloutDump
from megatron_dapo.trainers.generation import group_values, scored_part


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    files = write_arithmetic(directory, Arithmetic(train_rows=20, val_rows=1, sft_rows=1, sft_val_rows=1))
    return train_tokenizer(file_texts([files["train"]]), directory / "t")


def group(tokenizer, index: int, answers: dict[str, float]) -> Group:
    prompt = Prompt(
        f"0-{index}-0", 0, index, 0, (5,), ({"role": "user", "content": f"{index}+1=?"},), "math", str(index + 1)
    )
    trajectories, scores = [], []
    for sample, (text, acc) in enumerate(answers.items()):
        ids = tuple(tokenizer(text)["input_ids"])
        trajectories.append(Trajectory(prompt.uid, sample, ids, (0.0,) * len(ids), "stop", (0,) * len(ids)))
        scores.append(Score(reward=2 * acc - 1, raw=2 * acc - 1, acc=acc))
    return Group(prompt, tuple(trajectories), tuple(scores))


def write_step(run_dir: Path, tokenizer, kind: str) -> None:
    """One step of three groups: one trained, one all wrong, one too many."""
    trainer = {
        "default_local_dir": str(run_dir),
        "rollout_data_dir": str(run_dir / "rollouts"),
        "rollout_data_format": kind,
    }
    config = Config(trainer=trainer)
    config.save(run_dir)
    (run_dir / "metrics.jsonl").write_text('{"step": 3}\n')
    groups = [
        group(tokenizer, 1, {"Answer: 2": 1.0, "Answer: 7": 0.0}),
        group(tokenizer, 2, {"no": 0.0, "nothing": 0.0}),
        group(tokenizer, 3, {"Answer: 4": 1.0, "Answer: 5": 0.0}),
    ]
    dump = RolloutDump(config, tokenizer)
    dump.filtered(groups, [True, False, True], lambda g: group_values(g, "acc", {}))
    mask = torch.tensor([[True, True, False], [True, True, True]])
    advantages = torch.tensor([[0.5, 0.7, 9.0], [-0.6, -0.6, -0.6]])
    dump.trained(TensorDict({"response_mask": mask, "advantages": advantages}, batch_size=[2]), groups[:1])
    dump.write(3, groups[:1])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_trajectory_is_kept_with_its_fate(kind: str, tokenizer, tmp_path: Path):
    write_step(tmp_path, tokenizer, kind)
    run = read_run(tmp_path)
    assert run.rollout_steps() == [3]
    rows = run.rollouts(3)
    assert [(row["uid"], row["sample"], row["fate"]) for row in rows] == [
        ("0-1-0", 0, "trained"), ("0-1-0", 1, "trained"),
        ("0-2-0", 0, "dropped: all acc = 0"), ("0-2-0", 1, "dropped: all acc = 0"),
        ("0-3-0", 0, "surplus"), ("0-3-0", 1, "surplus"),
    ]  # fmt: skip
    assert [row["advantage"] for row in rows] == [pytest.approx(0.6), pytest.approx(-0.6), None, None, None, None]
    assert (rows[0]["prompt"], rows[0]["response"], rows[0]["ground_truth"]) == ("1+1=?", "Answer: 2", "2")


def test_a_sample_that_could_not_be_scored_is_kept(tokenizer, tmp_path: Path):
    trainer = {"default_local_dir": str(tmp_path), "rollout_data_dir": str(tmp_path / "rollouts")}
    config = Config(trainer=trainer)
    config.save(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    whole = group(tokenizer, 1, {"Answer: 2": 1.0, "Answer: 7": 0.0, "loop": 0.0})
    whole = replace(whole, scores=(*whole.scores[:2], Score(0.0, 0.0, 0.0, status="failed")))
    dump = RolloutDump(config, tokenizer)
    dump.failed([whole])
    dump.left(group(tokenizer, 2, {"old": 0.0}), "stale")
    dump.write(1, [scored_part(whole)])
    rows = read_run(tmp_path).rollouts(1)
    assert [(row["uid"], row["sample"], row["fate"], row["status"]) for row in rows] == [
        ("0-1-0", 0, "trained", "ok"), ("0-1-0", 1, "trained", "ok"), ("0-1-0", 2, "failed", "failed"),
        ("0-2-0", 0, "stale", "ok"),
    ]  # fmt: skip
    assert main(["rollouts", str(tmp_path)]) == 0


def test_without_a_directory_nothing_is_kept(tokenizer, tmp_path: Path):
    dump = RolloutDump(Config(trainer={"default_local_dir": str(tmp_path)}), tokenizer)
    groups = [group(tokenizer, 1, {"Answer: 2": 1.0})]
    dump.filtered(groups, [True], lambda g: [1.0])
    dump.write(1, groups)
    assert not list(tmp_path.iterdir()) and not dump._kept


def test_the_command_shows_best_worst_and_what_matches(tokenizer, tmp_path: Path, capsys):
    write_step(tmp_path, tokenizer, "jsonl")

    def shown(*words: str) -> str:
        assert main(["rollouts", str(tmp_path), *words]) == 0
        return capsys.readouterr().out

    everything = shown()
    assert "step 3: 6 generations in 3 groups (1 trained, 1 dropped: all acc = 0, 1 surplus)" in everything
    assert "reward +1.00 · acc 1 · advantage +0.600" in everything
    best = shown("--best", "--limit", "1")
    assert "0-1-0 sample 0" in best and "sample 1" not in best and "5 more" in best
    assert "reward -1.00" in shown("--worst", "--limit", "1").split("\n\n")[1]
    assert "; 1 match" in shown("--grep", "noth.ng") and "nothing" in shown("--grep", "noth.ng")
    assert "; 2 match" in shown("--fate", "dropped")
    for words, complaint in (
        (["--step", "4"], "step 4 has no generations"),
        (["--grep", "("], "not a regular expression"),
    ):
        assert main(["rollouts", str(tmp_path), *words]) == 2
        assert complaint in capsys.readouterr().err
