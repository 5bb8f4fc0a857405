"""A run is read as it was written: resumed, still being written, with numbers JSON lacks."""

import json
import math

import pytest

from megatron_dapo.errors import UserError
from megatron_dapo.report.run_files import config_difference, natural, read_run, read_runs


def lines(path, *rows, torn: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


def test_resumed_steps_are_taken_once_and_a_torn_line_is_left_out(tmp_path):
    lines(
        tmp_path / "metrics.jsonl",
        {"step": 1, "a": 1.0},
        {"step": 2, "a": 2.0, "b": 0.0},
        {"step": 2, "a": 2.5},
        {"step": 3, "a": "NaN"},
        torn='{"step": 4, "a"',
    )
    run = read_run(tmp_path)
    assert run.steps == [1, 2, 3] and run.rows[1] == {"step": 2, "a": 2.5, "b": 0.0}
    assert math.isnan(run.rows[2]["a"]) and run.column("b") == [None, 0.0, None] and run.last("b") == 0.0
    assert run.name == tmp_path.name and run.config == {} and run.rollout_steps() == []


def test_the_metrics_file_itself_may_be_given_and_other_places_are_an_error(tmp_path):
    lines(tmp_path / "metrics.jsonl", {"step": 1, "a": 1.0})
    assert read_run(tmp_path / "metrics.jsonl").steps == [1]
    with pytest.raises(UserError, match="is not a run directory"):
        read_run(tmp_path / "elsewhere")


def test_runs_of_one_name_are_told_apart(tmp_path):
    for place in ("x/run", "y/run", "z"):
        (tmp_path / place).mkdir(parents=True)
        lines(tmp_path / place / "metrics.jsonl", {"step": 1})
        (tmp_path / place / "config.yaml").write_text("trainer: {experiment_name: same}")
    assert [run.name for run in read_runs([tmp_path / "x/run", tmp_path / "z"])] == ["run", "z"]
    assert [run.name for run in read_runs([tmp_path / "x/run", tmp_path / "y/run"])] == [
        str(tmp_path / "x/run"),
        str(tmp_path / "y/run"),
    ]


def test_config_difference_names_keys_and_values(run_dir, other_dir):
    difference = dict(config_difference(read_runs([run_dir, other_dir])))
    assert difference["actor.clip_ratio_high"] == [0.28, 0.2] and "rollout.n" not in difference
    assert config_difference(read_runs([run_dir])) == []


def test_rollouts_by_step(run_dir):
    run = read_run(run_dir)
    assert run.rollout_steps() == [1, 15, 30] and len(run.rollouts(15)) == 24


def test_natural_order():
    assert sorted(["layer_10", "layer_9", "a"], key=natural) == ["a", "layer_9", "layer_10"]
