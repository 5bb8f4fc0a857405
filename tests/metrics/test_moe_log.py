"""What is written about experts can be read again, and the what-if report answers from it."""

import json
import re

import numpy as np
import pytest

from megatron_dapo.errors import UserError
from megatron_dapo.metrics import MoELoadAccumulator, MoELog, megatron_placement, moe_report, read_jsonl, what_if


def write_run(run_dir, steps=(1, 2)) -> None:
    log = MoELog(run_dir)
    placement = megatron_placement(2, 16, world=8, expert=8, gpus_per_node=4)
    for step in steps:
        acc = MoELoadAccumulator(2, 16)
        ids = np.minimum(np.random.default_rng(step).geometric(0.3, (500, 2, 2)) - 1, 15)
        acc.update_rows(ids)
        log.write(step, "rollout", acc, placement)
    log.close()


def test_a_row_has_counts_and_gpu_loads(tmp_path):
    write_run(tmp_path)
    row = read_jsonl(tmp_path / "moe.jsonl")[1]
    assert row["step"] == 2 and row["source"] == "rollout" and row["gpus_per_node"] == 4
    assert np.asarray(row["counts"]).shape == (2, 16) and sum(row["gpu_load"]) == 2000


def test_report_prints_and_writes_the_answers(tmp_path):
    write_run(tmp_path)
    text = moe_report(tmp_path)
    assert "step 2 (rollout): 2,000 assignments, 2 layers × 16 experts" in text and "fitted on step 1" in text
    assert re.search(r"^    0 ▲[·░▒▓█▲]{15}$", text, re.M)  # expert 0 is the most popular one
    assert len(re.findall(r"^    \d (?: *\d\.\d\d){4}$", text, re.M)) == 2  # two nodes of four GPUs
    saved = json.loads((tmp_path / "moe_what_if.json").read_text())
    by_name = {v["name"]: v for v in saved["variants"]}
    assert saved["fitted_on_step"] == 1 and len(by_name["greedy"]["gpu_load"]) == 8
    assert by_name["greedy + 2 copies per GPU"]["overhead"] < by_name["greedy"]["overhead"]
    assert by_name["greedy"]["overhead"] < by_name["contiguous"]["overhead"]
    assert "on 4 GPUs" in moe_report(tmp_path, step=1, gpus=4) and "fitted on itself" in moe_report(tmp_path, step=1)


def test_more_gpus_than_experts_share_them():
    counts = np.tile(np.arange(1, 9), (2, 1))
    answers = what_if(counts, gpus=16, extra_slots=(1,))
    assert [a.name for a in answers] == ["contiguous", "greedy + 1 copies per GPU"]
    assert sum(answers[0].gpu_load) == pytest.approx(counts.sum(), rel=0.01)


def test_missing_data_is_named(tmp_path):
    with pytest.raises(UserError, match=r"moe\.jsonl does not exist"):
        moe_report(tmp_path)
    write_run(tmp_path)
    with pytest.raises(UserError, match=r"source 'training'; it has \['rollout'\]"):
        moe_report(tmp_path, source="training")
    with pytest.raises(UserError, match=r"step 7 .* steps: \[1, 2\]"):
        moe_report(tmp_path, step=7)
