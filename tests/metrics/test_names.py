"""Every metric name is documented, and the documentation is what the table says."""

import ast
import re
from pathlib import Path

import pytest
import torch

import megatron_dapo
from megatron_dapo import metrics as m
from megatron_dapo.metrics.names import FAMILIES, describe, document, undocumented
from megatron_dapo.metrics.trackers import Console
from tests.metrics.test_data import small_batch

PACKAGE = Path(megatron_dapo.__file__).parent
DOCS = PACKAGE.parent / "docs" / "metrics.md"
HEADS = {
    row.pattern.split("/")[0] for family in FAMILIES for row in family.names if "{" not in row.pattern.split("/")[0]
}
HEADS |= {"actor", "critic", "sft", "training", "val-core", "val-aux"}


def everything_this_room_emits() -> set[str]:
    dims = m.ModelDims(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=8, head=8)
    x = torch.rand(3, 3)
    mask = torch.ones(3, 3, dtype=torch.bool)
    acc = m.MoELoadAccumulator(2, 4)
    for _ in range(2):
        acc.update_rows(torch.tensor([[[0, 1], [2, 9]]]))
        moe: dict = {}
        acc.add_to_metrics(moe)
    acc.update_rows(torch.tensor([[[0, 1], [2, 3]]]))
    families = [
        m.data_metrics(small_batch(), use_critic=True, max_prompt_length=4),
        m.sequence_balance_metrics([1, 2], [[0], [1]]),
        m.timing_metrics({"gen": 1.0, "ref": 1.0}, 2, 3),
        m.throughput_metrics(1, 1.0, 1),
        m.memory_metrics(),
        m.efficiency_metrics("update_actor", dims, [3], 1.0, 1, training=True, peak_tflops=1.0),
        m.variance_proxy_metrics(x, -x, x, mask, gradient_norm=1.0),
        m.agreement_metrics(-x, -x * 2, mask),
        m.staleness_metrics([[1, 2]], 3),
        m.eviction_metrics([1]),
        m.spec_decode_metrics([1], [1], [1]),
        m.group_metrics([1, 0], [0, 0]),
        m.reward_metrics([1.0], [1.0], [1.0]),
        m.source_metrics(["openai/gsm8k"], [1.0]),
        m.verifier_metrics({"timeouts": 1}, [0.1]),
        m.push_metrics(1.0, 1, received=1, stored=1),
        m.validation_metrics(["a/b"] * 3, ["p"] * 3, {"acc": [1, 0, 1], "reward": [1, 0, 1]}, ["x", "y", "x"]),
        m.routing_disagreement(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)),
        m.source_distance(acc, acc),
        m.placement_metrics(acc.counts.numpy(), m.megatron_placement(2, 4, world=2, expert=2)),
        moe,
    ]
    return {name for family in families for name in m.compute(family)}


def test_every_name_of_this_room_is_documented():
    names = everything_this_room_emits()
    assert len(names) > 120 and undocumented(names) == []


def test_every_name_written_out_anywhere_in_the_package_is_documented():
    """Literal names in the other rooms; names put together at run time are checked on real runs by their tests."""
    looks_like_a_name = re.compile(r"[a-z_-]+(/[a-zA-Z0-9_@-]+)+")
    found: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        keys = [k for node in ast.walk(tree) if isinstance(node, ast.Dict) for k in node.keys]
        keys += [node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
        for node in keys:
            name = node.value if isinstance(node, ast.Constant) else None
            if isinstance(name, str) and looks_like_a_name.fullmatch(name) and name.split("/")[0] in HEADS:
                found[name] = path.name
    missing = undocumented(found)
    assert not missing, f"document these in metrics/names.py: {[(name, found[name]) for name in missing]}"


def test_every_family_is_fed():
    """A family that nobody calls is documented and charted for nothing."""
    rooms = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "metrics"]
    calls = [
        node.func for path in rooms for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]
    called = {node.id for node in calls if isinstance(node, ast.Name)}
    families = {name for name in m.__all__ if name.endswith("_metrics")} | {"routing_disagreement", "source_distance"}
    assert len(families) > 15 and families - called == set()


def test_an_unknown_name_is_reported_and_step_is_not_a_metric():
    assert undocumented(["actor/entropi", "step", "actor/entropy", "actor/entropy/p99"]) == [
        "actor/entropi",
        "actor/entropy/p99",
    ]
    assert describe("rollout/moe/cv/layer_12").good == "near 0" and describe("rollout/moe/cv/layer_x") is None
    assert describe("val-core/openai/gsm8k/acc/best@32/mean").unit == "value"


def test_the_console_shows_documented_metrics():
    assert undocumented(name for _, name, _ in Console.columns) == []


def test_the_page_is_what_the_table_prints():
    assert DOCS.read_text() == document(), "docs/metrics.md is out of date: the command stands in metrics/names.py"


@pytest.mark.parametrize("row", [row for family in FAMILIES for row in family.names], ids=lambda row: row.pattern)
def test_rows_are_complete(row):
    assert (
        row.unit and row.meaning.endswith((".", "…1.")) and (row.good in ("", "up", "down") or row.good[:5] == "near ")
    )
