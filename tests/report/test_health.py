"""The notes fire on what they are about and stay quiet otherwise."""

import json

import pytest

from megatron_dapo.report.health import duration, figures, notes
from megatron_dapo.report.run_files import read_run


def run_of(tmp_path, columns: dict, config: str = ""):
    length = max(len(values) for values in columns.values())
    rows = [{"step": i + 1} | {name: v[i] for name, v in columns.items() if i < len(v)} for i in range(length)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(config)
    return read_run(tmp_path)


@pytest.mark.parametrize(
    ("columns", "level", "words"),
    [
        ({"actor/grad_norm": [1.0, "NaN", "Infinity"]}, "bad", "actor/grad_norm is not finite at step 2 and 1 more"),
        ({"push/failed": [0.0, 1.0]}, "bad", "checksum"),
        ({"training/rollout_logprob_diff_max": [1e-5, 0.02]}, "bad", "disagree by up to 0.02"),
        ({"actor/entropy": [1.0] * 10 + [0.01] * 10}, "warn", "Entropy fell"),
        ({"critic/score/mean": [0.5] * 10 + [0.4] * 10}, "warn", "did not rise"),
        ({"training/filter_groups/kept": [1] * 20, "training/filter_groups/generated": [10] * 20}, "warn", "Only 10%"),
        ({"actor/grad_norm": [1.0, 1.2, 900.0, 1.1]}, "warn", "jumped to 900 at step 3 (median 1.1)"),
        ({"actor/pg_clipfrac": [0.5]}, "warn", "50% of tokens are clipped"),
        ({"response_length/clip_ratio": [0.3]}, "warn", "30% of responses hit"),
        ({"rollout/moe/routed_experts_found": [1.0, 0.0]}, "warn", "No expert choices came from rollout at step 2"),
        ({"rollout/moe/invalid_assignments": [3.0]}, "bad", "3 expert ids of rollout"),
        ({"rollout/moe/gpu_load/max_over_mean": [2.0]}, "warn", "factor of 2.00"),
        ({"actor/entropy": [1.0, 0.9]}, "good", "Nothing stands out"),
    ],
)
def test_notes(tmp_path, columns, level, words):
    found = notes(run_of(tmp_path, columns))
    assert [note.level for note in found] == [level] and words in found[0].text


def test_low_precision_may_differ_more(tmp_path):
    columns = {"training/rollout_logprob_diff_max": [0.2]}
    assert notes(run_of(tmp_path, columns, "model: {dtype: bfloat16}"))[0].level == "good"


def test_worst_comes_first(tmp_path):
    found = notes(run_of(tmp_path, {"actor/pg_clipfrac": [0.5], "push/failed": [1.0]}))
    assert [note.level for note in found] == ["bad", "warn"]


def test_figures_say_what_changed(run_dir):
    tiles = {tile.label: tile for tile in figures(read_run(run_dir))}
    assert tiles["Steps"].value == "30" and tiles["Steps"].before == "of 60"
    accuracy = tiles["Accuracy, validation"]
    assert accuracy.before == "from 8.0%" and accuracy.good is True
    assert tiles["Hit length limit"].good is False and tiles["Entropy"].good is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4, "4 s"), (65, "1 min 05 s"), (3 * 3600 + 720, "3 h 12 min"), (float("nan"), "?")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
