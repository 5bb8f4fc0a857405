"""`plan reshard`: each byte once, evenly sent, quickly planned, for the bundled networks."""

import json

import pytest

from megatron_dapo.cli.main import main
from megatron_dapo.errors import UserError
from megatron_dapo.planner.reshard import plan_reshard

KEYS = {"bytes_moved", "bytes_lower_bound", "ratio", "naive_bytes", "plan_seconds", "send_max_over_mean", "pairs"}


@pytest.mark.parametrize(
    "words",
    [
        [
            "model=qwen3-30b-a3b",
            "train.world=128",
            "train.tp=4",
            "train.pp=4",
            "train.ep=8",
            "rollout.tp=8",
            "rollout.engines=16",
        ],
        ["model=qwen2.5-32b", "train.world=64", "train.tp=8", "train.pp=2", "rollout.tp=4", "rollout.engines=4"],
        ["model=deepseek-v3", "train.world=64", "train.pp=8", "train.ep=8", "rollout.tp=8", "rollout.engines=1"],
    ],
    ids=lambda words: words[0],
)
def test_bundled_networks(words: list[str], capsys):
    assert main(["plan", "reshard", *words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert set(plan) >= KEYS
    assert plan["bytes_moved"] == plan["bytes_lower_bound"] and plan["ratio"] == 1.0
    assert plan["naive_bytes"] > 3 * plan["bytes_moved"]
    assert plan["send_max_over_mean"] <= 1.1 or "deepseek" in words[0]


def test_table_and_uneven_stages(capsys):
    assert main(["plan", "reshard", "model=demo", "train.world=4", "train.pp=2", "train.ep=2", "rollout.tp=2"]) == 0
    shown = capsys.readouterr().out
    assert "ratio 1.0000" in shown and "2 engines of 2" in shown
    plan = plan_reshard(["model=smollm2-135m", "train.pp=4", "rollout.tp=3"])
    assert (plan.topology.first_stage_layers, plan.topology.last_stage_layers) == (7, 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=demo", "train.tb=2"], "train.tb=2"),
        (["model=demo", "train.tp=two"], "whole number"),
        (["model=demo", "train.tp=3"], "illegal"),
        (["model=demo", "rollout.tp=3"], "rollout.tp=3"),
        (["train.tp=2"], "model="),
    ],
)
def test_mistakes(words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        plan_reshard(words)
