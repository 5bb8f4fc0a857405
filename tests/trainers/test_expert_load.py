"""Expert load from ranks to report: what is counted, what travels, where a layer's experts are said to lie."""

import numpy as np
import pytest
import torch

from megatron_dapo.metrics import compute, read_jsonl
from megatron_dapo.metrics.names import undocumented
from megatron_dapo.models.architecture import Architecture, Mixture, Rope
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.rollout.requests import Generation
from megatron_dapo.trainers.efficiency import model_dims
from megatron_dapo.trainers.expert_load import Counts, ExpertLoad, RankLoad, training_placement

ARCH = Architecture(
    "qwen3_moe", layers=3, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=32, tied=False, norm_eps=1e-6,
    max_positions=64, rope=Rope(1e4), mixture=Mixture(experts=4, topk=2, ffn=6, layers=(1, 2)),
)  # fmt: skip


def sample(routed: np.ndarray | None, tokens: int = 3) -> Generation:
    return Generation("r", tuple(range(tokens)), (0.0,) * tokens, "stop", None, (0,) * tokens, routed)


def routing(layers: int) -> np.ndarray:
    """Five rows (three prompt tokens, two response tokens that were fed); prompt rows all choose expert 3."""
    rows = np.full((5, layers, 2), 3, dtype=np.uint8)
    rows[3:, -2] = [[0, 1], [0, 2]]
    rows[3:, -1] = [[1, 2], [1, 2]]
    return rows


@pytest.mark.parametrize("layers", [2, 3], ids=["mixture layers only", "a row for the dense layer too"])
def test_response_tokens_of_mixture_layers_are_counted_and_routing_stays(layers: int):
    load = RankLoad(ARCH, keep_routing=False)
    passed = load.sampled([sample(routing(layers)), sample(None)])
    assert [one.routed_experts for one in passed] == [None, None]
    taken = load.take()
    assert taken.rollout.tolist() == [[2, 1, 1, 0], [0, 2, 2, 0]] and taken.training is None
    assert load.take() == Counts(None, None)
    wrong = routing(2)
    wrong[4, 0] = 7  # no such expert
    load.sampled([sample(wrong)])
    assert load.take().invalid == 2
    load.sampled([sample(None)])
    assert not load.take().rollout.any()  # sampled, and nobody told where it went
    assert RankLoad(ARCH, keep_routing=True).sampled([sample(routing(2))])[0].routed_experts is not None


class Group:
    """Two ranks that counted."""

    size = 2

    def __init__(self, *counts: Counts) -> None:
        self.counts = counts

    def call(self, method: str) -> list[Counts]:
        assert method == "take_expert_load"
        return list(self.counts)


def test_ranks_add_up_to_metrics_and_reports(tmp_path):
    load = ExpertLoad(ARCH, Topology(world=2, expert=2), tmp_path, every=2)
    one, two = torch.tensor([[4, 0, 0, 0], [1, 1, 1, 1]]), torch.tensor([[0, 4, 0, 0], [1, 1, 1, 1]])
    group = Group(Counts(one, one), Counts(two, None))
    values = compute(load.step(group, 1, last=False))
    assert not undocumented(values)
    assert values["rollout/moe/routed_expert_assignments"] == 16
    assert values["rollout/moe/max_vio/layer_0"] == 1.0 and values["rollout/moe/max_vio/layer_1"] == 0.0
    assert values["rollout/moe/ep_rank_load/worst_layer"] == 2.0  # experts 0 and 1 are both of rank 0
    assert values["training/moe/dead_experts/layer_0"] == 3
    assert values["training/moe/rollout_distance/max"] == 0.5
    load.step(group, 2, last=False)
    load.step(group, 3, last=True)
    rows = read_jsonl(tmp_path / "moe.jsonl")
    assert [(row["step"], row["source"]) for row in rows] == [
        (s, w) for s in (1, 2, 3) for w in ("rollout", "training")
    ]
    assert rows[0]["counts"] == (one + two).tolist() and rows[0]["gpu_load"] == [12.0, 4.0]


def test_silence_and_nonsense_are_told(tmp_path):
    load = ExpertLoad(ARCH, Topology(world=2, expert=2), tmp_path, every=2)
    none, some = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
    values = compute(load.step(Group(Counts(none, some, invalid=3)), 1, last=False))
    assert values["rollout/moe/routed_experts_found"] == 0 and values["rollout/moe/invalid_assignments"] == 3
    assert values["training/moe/routed_experts_found"] == 1 and not undocumented(values)
    assert compute(load.step(Group(Counts(None, None)), 2, last=False)) == {}  # nothing was sampled or trained


def test_engines_of_the_driver_count_and_what_belongs_to_no_step_is_dropped(tmp_path):
    load = ExpertLoad(ARCH, Topology(world=2, expert=2), tmp_path, every=2)
    load.own = RankLoad(ARCH, keep_routing=False)
    load.own.sampled([sample(routing(2))] * 3)
    load.drop(Group(Counts(torch.ones(2, 4, dtype=torch.int64), None)))
    load.own.sampled([sample(routing(2))])
    values = compute(load.step(Group(), 1, last=False))
    assert values["rollout/moe/routed_expert_assignments"] == 8 and "rollout/moe/drift/max" not in values
    assert [row["counts"] for row in read_jsonl(tmp_path / "moe.jsonl")] == [[[2, 1, 1, 0], [0, 2, 2, 0]]]


def test_drift_is_measured_across_a_resumption(tmp_path):
    """A checkpoint is written after a step's counts are there and before they are reported."""

    def counted(*row: int) -> Group:
        return Group(Counts(torch.tensor([row, row]), None))

    load, resumed = (ExpertLoad(ARCH, Topology(world=2, expert=2), tmp_path / name, every=2) for name in ("a", "b"))
    load.step(counted(8, 0, 0, 0), 1, last=False)
    load.collect(counted(4, 4, 0, 0))
    resumed.load_state_dict(load.state_dict())
    load.step(Group(), 2, last=False)
    last = counted(2, 2, 2, 2)
    told = compute(load.step(last, 3, last=False)), compute(resumed.step(last, 3, last=False))
    assert told[0] == told[1] and told[0]["rollout/moe/drift/max"] == 0.5


def test_pipeline_stages_hold_their_own_layers():
    topology = Topology(world=4, pipeline=2, expert=2, first_stage_layers=2, last_stage_layers=1)
    placement = training_placement(ARCH, topology, ranks_per_node=2)
    assert placement.node == (0, 0, 1, 1)
    assert placement.holds.tolist() == [[True, True, False, False], [False, False, True, True]]


def test_model_flops_see_the_true_architecture():
    dims = model_dims(ARCH)
    assert (dims.layers, dims.moe_layers, dims.experts, dims.topk, dims.head, dims.mla) == (3, 2, 4, 2, 32, None)
    assert model_dims(ARCH, head=1).head == 1
