"""Every row is computed once per data-parallel group, and every token comes back to its place."""

import pytest
import torch
from tensordict import TensorDict

from megatron_dapo.parallel.topology import Topology
from megatron_dapo.trainers.dispatch import Dispatcher

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


def test_more_ranks_than_rows_get_padding_that_counts_nowhere():
    rows = batch(3)
    dispatcher = Dispatcher(Topology(world=8), max_tokens=64)
    plan = dispatcher.plan(rows["prompt_length"] + rows["response_length"])
    shares = dispatcher.shares(rows, plan, ["response_mask"])
    assert sum(len(micro) for share in plan for micro in share) == 3
    padding = [share[0] for share, mine in zip(shares, plan, strict=True) if not mine[0]]
    assert len(padding) == 5
    assert all(not micro["response_mask"].any() and int(micro["response_length"][0]) == 1 for micro in padding)


def test_outputs_come_from_the_last_stage():
    topology = Topology(world=8, tensor=2, pipeline=2)
    ranks = Dispatcher(topology, 64).output_ranks()
    at = [topology.coordinate(rank) for rank in ranks]
    assert [c.dp for c in at] == [0, 1]
    assert all((c.tp, c.cp, c.pp) == (0, 0, 1) for c in at)
