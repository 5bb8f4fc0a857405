"""Every row is computed once per data-parallel group, and every token comes back to its place."""

import pytest
import torch
from tensordict import TensorDict

from megatron_dapo.data.batch import ragged
from megatron_dapo.engine.packed import pack_rows
from megatron_dapo.engine.routing import RowRouting
from megatron_dapo.metrics.efficiency import forward_flops
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.trainers.dispatch import Dispatcher
from megatron_dapo.trainers.efficiency import linear_cost, model_dims
from tests.models.hf_models import CONFIGS

LAYOUTS = [
    Topology(world=1),
    Topology(world=4),
    Topology(world=8, tensor=2, pipeline=2),
    Topology(world=8, tensor=2, context=2, expert=2),
]


def batch(rows: int = 13) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, 6, (rows,), generator=generator)
    response = torch.randint(0, 8, (rows,), generator=generator)
    return TensorDict(
        {
            "prompts": torch.arange(rows)[:, None].expand(rows, 5).contiguous(),
            "prompt_length": prompt,
            "responses": torch.arange(rows)[:, None].expand(rows, 7).contiguous(),
            "response_length": response,
            "response_mask": torch.arange(7)[None] < response[:, None],
            "weight": torch.arange(rows * 7).float().view(rows, 7),
        },
        batch_size=[rows],
    )


@pytest.mark.parametrize("topology", LAYOUTS, ids=lambda t: t.describe())
def test_what_goes_out_comes_back_in_place(topology):
    rows = batch()
    dispatcher = Dispatcher(topology, max_tokens=24)
    plan = dispatcher.plan(rows["prompt_length"] + rows["response_length"])
    shares = dispatcher.shares(rows, plan, ["weight", "response_mask"])
    results = [[{"doubled": micro["weight"] * 2 * micro["response_mask"]} for micro in share] for share in shares]
    found = dispatcher.collect(results, plan, len(rows), 7)["doubled"]
    assert torch.equal(found, rows["weight"] * 2 * rows["response_mask"])


@pytest.mark.parametrize("topology", LAYOUTS, ids=lambda t: t.describe())
def test_ranks_of_one_replica_get_the_same_and_all_get_equally_many(topology):
    rows = batch()
    dispatcher = Dispatcher(topology, max_tokens=24)
    shares = dispatcher.shares(rows, dispatcher.plan(rows["prompt_length"] + rows["response_length"]), [])
    assert len({len(share) for share in shares}) == 1
    for a in topology.coordinates():
        for b in topology.coordinates():
            if a.dp == b.dp:
                assert shares[a.rank] is shares[b.rank]


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("tensor", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [24, 29, 35])
def test_no_packed_micro_batch_exceeds_the_bound_before_the_cut(context, tensor, max_tokens):
    rows, topology = batch(), Topology(world=2 * context * tensor, tensor=tensor, context=context)
    dispatcher = Dispatcher(topology, max_tokens)
    for share in dispatcher.shares(rows, dispatcher.plan(rows["prompt_length"] + rows["response_length"]), []):
        for micro in share:
            packed = pack_rows(micro, context_parallel=context, tensor_parallel=tensor)
            assert int(packed.cu_seqlens[-1]) <= max_tokens
            assert packed.tokens.shape[1] * context == int(packed.cu_seqlens[-1])


def test_more_ranks_than_rows_get_padding_that_counts_nowhere():
    rows = batch(3)
    dispatcher = Dispatcher(Topology(world=8), max_tokens=64)
    plan = dispatcher.plan(rows["prompt_length"] + rows["response_length"])
    shares = dispatcher.shares(rows, plan, ["response_mask"])
    assert sum(len(micro) for share in plan for micro in share) == 3
    padding = [share[0] for share, mine in zip(shares, plan, strict=True) if not mine[0]]
    assert len(padding) == 5
    assert all(not micro["response_mask"].any() and int(micro["response_length"][0]) == 1 for micro in padding)
    assert not any(pack_rows(micro).real.any() for micro in padding)
    real = [pack_rows(micro).real for share in shares for micro in share]
    assert sum(int(one.sum()) for one in real) == int((rows["prompt_length"] + rows["response_length"]).sum())


def test_outputs_come_from_the_last_stage():
    topology = Topology(world=8, tensor=2, pipeline=2)
    ranks = Dispatcher(topology, 64).output_ranks()
    at = [topology.coordinate(rank) for rank in ranks]
    assert [c.dp for c in at] == [0, 1]
    assert all((c.tp, c.cp, c.pp) == (0, 0, 1) for c in at)


def test_without_balancing_ranks_get_rows_in_order():
    rows = batch()
    plan = Dispatcher(Topology(world=4), max_tokens=24, balance=False).plan(
        rows["prompt_length"] + rows["response_length"]
    )
    dealt = [sorted(row for micro in of_rank for row in micro) for of_rank in plan]
    assert dealt == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_the_linear_cost_is_the_architectures(name):
    arch = Architecture.from_hf(CONFIGS[name].to_dict())
    short, long = (forward_flops(model_dims(arch), [n]) for n in (100, 1000))
    cost = linear_cost(arch)
    assert long / short == pytest.approx((cost * 1000 + 1000**2) / (cost * 100 + 100**2))


def test_rows_are_balanced_by_what_they_cost():
    """Where attention weighs more, the longest row stands with lighter ones."""

    def with_the_longest(cost: float) -> list[int]:
        lengths = torch.tensor([1700, 1600, 1400, 1300, 900, 200])
        plan = Dispatcher(Topology(world=2), 10_000, linear_cost=cost).plan(lengths)
        return next(rows for rank in plan if 0 in (rows := sorted(row for micro in rank for row in micro)))

    assert (with_the_longest(300), with_the_longest(25_000)) == ([0, 2, 5], [0, 1, 5])


def test_an_interleaved_pipeline_gets_whole_rounds_of_micro_batches():
    rows = batch()
    topology = Topology(world=4, pipeline=4, virtual_pipeline=2)
    plan = Dispatcher(topology, max_tokens=24).plan(rows["prompt_length"] + rows["response_length"])
    assert len(plan[0]) % 4 == 0


@pytest.mark.parametrize("topology", LAYOUTS, ids=lambda t: t.describe())
def test_routing_goes_out_padded_and_comes_back_by_row(topology):
    """Each stage answers with what it was sent, for its share of the layers."""
    rows = batch()
    lengths = rows["prompt_length"] + rows["response_length"]
    layers = 2 * topology.pipeline
    routing = [torch.arange(n * layers * 2).view(n, layers, 2) + 1000 * i for i, n in enumerate(lengths.tolist())]
    rows["old_routing"] = ragged(routing)
    dispatcher = Dispatcher(topology, max_tokens=24)
    plan = dispatcher.plan(lengths)
    shares = dispatcher.shares(rows, plan, ["weight"], "old_routing")
    results = []
    for place, share in zip(topology.coordinates(), shares, strict=True):
        mine = (place.pp, place.pp + topology.pipeline)
        results.append([RowRouting(mine, micro["routed_experts"][:, :, list(mine)]) for micro in share])
        for micro in share:
            assert (
                torch.equal(micro["routed_length"], micro["prompt_length"] + micro["response_length"])
                or len(micro) == 1
            )
    found = dispatcher.collect_routing(results, plan, lengths)
    assert all(torch.equal(a, b) for a, b in zip(found, routing, strict=True))
