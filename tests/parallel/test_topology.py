"""Ranks stand where Megatron puts them, and an illegal layout is told in full, with legal neighbours."""

from itertools import product

import pytest

from megatron_dapo.parallel.topology import Topology

SIZES = [
    dict(tensor=t, context=c, pipeline=p, expert=e, expert_tensor=x)
    for t, c, p, e, x in product((1, 2), (1, 2), (1, 2), (1, 2, 4), (None, 1, 2))
    if 8 % (t * c * p) == 0
]


def megatron_ranks(topology: Topology, name: str, expert: bool) -> list[list[int]]:
    from megatron.core.parallel_state import RankGenerator

    t = topology
    if expert:
        generator = RankGenerator(tp=t.etp, ep=t.expert, dp=t.expert_data, pp=t.pipeline, cp=1, order="tp-cp-ep-dp-pp")
    else:
        generator = RankGenerator(tp=t.tensor, ep=1, dp=t.data, pp=t.pipeline, cp=t.context, order="tp-cp-ep-dp-pp")
    return generator.get_ranks(name)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "-".join(f"{k[0]}{v}" for k, v in s.items()))
def test_coordinates_agree_with_megatron(sizes):
    topology = Topology(world=8, **sizes)
    if topology.problems():
        pytest.skip("not a legal layout")
    names = {"tp": ("tp", False), "cp": ("cp", False), "dp": ("dp", False), "pp": ("pp", False)}
    names |= {"ep": ("ep", True), "etp": ("tp", True), "edp": ("dp", True)}
    for ours, (theirs, expert) in names.items():
        for group in megatron_ranks(topology, theirs, expert):
            assert [getattr(topology.coordinate(rank), ours) for rank in group] == list(range(len(group)))


def test_sizes_follow():
    topology = Topology(world=16, tensor=2, pipeline=2, context=2, expert=4)
    assert (topology.data, topology.etp, topology.expert_data) == (2, 1, 2)
    assert Topology(world=4, tensor=2).etp == 2
    assert Topology(world=4, tensor=2, expert=2).etp == 1
    with pytest.raises(ValueError, match="rank 16"):
        topology.coordinate(16)


def test_all_problems_at_once():
    problems = Topology(world=6, tensor=4, pipeline=2, virtual_pipeline=3).problems(
        layers=7, heads=6, kv_heads=3, ffn=9
    )
    text = "\n".join(problems)
    for part in ("world 6", "6 attention heads", "3 KV heads", "feed-forward size 9", "7 layers", "nearest legal"):
        assert part in text


def test_nearest_layouts_are_legal_and_near():
    topology = Topology(world=8, tensor=8)
    near = topology.nearest_legal(layers=4, heads=12, kv_heads=4)
    assert near[0].tensor == 4
    assert all(not other.problems(layers=4, heads=12, kv_heads=4) for other in near)
    assert "nearest legal layouts: tensor 4" in topology.problems(layers=4, heads=12, kv_heads=4)[-1]


def test_expert_parallelism_needs_experts():
    assert "no experts" in Topology(world=2, expert=2).problems(layers=2, heads=2)[0]
    assert Topology(world=2, expert=2).problems(layers=2, heads=2, experts=4) == []


def test_kv_heads_may_divide_the_tensor_size():
    assert Topology(world=4, tensor=4).problems(layers=2, heads=8, kv_heads=2) == []
    assert Topology(world=4, tensor=4).problems(layers=2, heads=12, kv_heads=3) != []
