"""The accumulator counts what was routed, nothing else: no fillers, no wrapped ids, nothing twice."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.metrics import MoELoadAccumulator, compute, merge, routing_disagreement, source_distance
from megatron_dapo.metrics.moe import CPU_CHUNK, balance

L, E, K = 2, 4, 2


def routing(b: int, s: int, dtype=torch.int64, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, E, (b, s, L, K), generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_hand(routed: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    counts = [[0] * E for _ in range(L)]
    for b in range(len(mask)):
        valid = mask[b].nonzero().flatten().tolist()[:-1]
        for t in valid:
            for layer in range(L):
                for e in routed[b, routed.shape[1] - mask.shape[1] + t, layer].tolist():
                    counts[layer][e] += 1
    return counts


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_counts_response_tokens_without_each_rows_last(mask, prompt_width):
    mask = torch.tensor(mask)
    routed = routing(len(mask), 5 + prompt_width)
    acc = MoELoadAccumulator(L, E)
    acc.update(routed, mask)
    assert acc.counts.tolist() == by_hand(routed, mask) and acc.invalid == 0


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.uint32, np.int64])
def test_every_integer_type_and_numpy_count_the_same(dtype):
    routed, mask = routing(3, 9), torch.ones(3, 6, dtype=torch.bool)
    acc = MoELoadAccumulator(L, E)
    acc.update(routed.numpy().astype(dtype), mask)
    assert acc.counts.tolist() == by_hand(routed, mask)


def test_a_trajectory_counts_as_its_padded_row_does():
    prompt, response = 3, 4
    routed = routing(1, prompt + response)
    padded, single = MoELoadAccumulator(L, E), MoELoadAccumulator(L, E)
    padded.update(routed, torch.ones(1, response, dtype=torch.bool))
    single.update_trajectory(routed[0, :-1].numpy().astype(np.uint8), response)
    assert torch.equal(padded.counts, single.counts) and int(single.counts.sum()) == 3 * L * K
    for too_short in (0, 1):
        single.update_trajectory(routed[0, :-1], too_short)
    assert torch.equal(padded.counts, single.counts)


def test_many_trajectories_count_as_each_of_them_does(monkeypatch):
    monkeypatch.setattr("megatron_dapo.metrics.moe.CPU_CHUNK", 10 * L * K)  # several together, and some alone
    samples = [(routing(1, 5 + n)[0], n) for n in (0, 1, 2, 30, 3, 4, 7, 12)]
    together, alone = MoELoadAccumulator(L, E), MoELoadAccumulator(L, E)
    together.update_trajectories(samples)
    for ids, length in samples:
        alone.update_trajectory(ids, length)
    assert torch.equal(together.counts, alone.counts) and int(alone.counts.sum()) == (1 + 29 + 2 + 3 + 6 + 11) * L * K
    with pytest.raises(ValueError, match="9 response tokens need 8"):
        alone.update_trajectories([(routing(1, 5)[0], 9)])


def test_a_trajectory_whose_prompt_came_from_the_prefix_cache_counts_the_same():
    routed = routing(1, 8)[0]
    whole, cached = MoELoadAccumulator(L, E), MoELoadAccumulator(L, E)
    whole.update_trajectory(routed, 4)
    cached.update_trajectory(routed[4:], 4)  # the engine reports no rows for cached prompt tokens
    assert torch.equal(whole.counts, cached.counts)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_invalid_ids_are_counted_and_skipped_never_wrapped(dtype):
    ids = torch.tensor([[[0, 3], [1, 2]]], dtype=dtype)
    bad = ids.clone()
    bad[0, 0, 0] = 200 if dtype == torch.uint8 else -1
    bad[0, 0, 1] = E  # would fall on expert 0 of the next layer
    acc = MoELoadAccumulator(L, E)
    acc.update_rows(torch.cat([ids, bad]))
    assert acc.counts.tolist() == [[1, 0, 0, 1], [0, 2, 2, 0]] and acc.invalid == 2
    assert acc.compute()["rollout/moe/invalid_assignments"] == 2.0


def test_fillers_of_the_last_token_are_never_seen():
    routed = routing(2, 4)
    routed[:, -1] = -1
    acc = MoELoadAccumulator(L, E)
    acc.update(routed, torch.ones(2, 3, dtype=torch.bool))
    assert acc.invalid == 0 and int(acc.counts.sum()) == 2 * 2 * L * K


def test_the_training_router_counts_a_micro_batch_once_despite_recomputation():
    acc = MoELoadAccumulator(3, E, prefix="training/moe")
    ids = torch.tensor([[0, 1], [0, 2]])
    for pass_ in range(2):  # forward, and the forward again inside backward
        for micro_batch in range(2):
            acc.update_layer(1, ids, once=(0, micro_batch))
        assert acc.counts.tolist() == [[0] * E, [4, 2, 2, 0], [0] * E], pass_
    acc.reset()
    acc.update_layer(1, ids, once=(0, 0))
    assert int(acc.counts.sum()) == 4
    with pytest.raises(ValueError, match="layer 3 is not one of 3"):
        acc.update_layer(3, ids)


def test_metrics_of_a_known_load():
    counts = torch.tensor([[4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    got = balance(counts, "m")
    assert got["m/max_vio/layer_0"] == 3.0 and got["m/min_vio/layer_0"] == -1.0 and got["m/avg_vio/layer_0"] == 1.5
    assert got["m/avg_vio/avg"] == 0.75 and got["m/max_vio/max"] == 3.0 and got["m/max_vio/layer_1"] == 0.0
    assert got["m/entropy/layer_0"] == 0.0 and got["m/entropy/layer_1"] == pytest.approx(1.0)
    assert got["m/dead_experts/max"] == 3.0 and got["m/cv/layer_0"] == pytest.approx(3**0.5)
    assert "m/max_vio/layer_2" not in got  # a layer of another pipeline stage


def test_add_to_metrics_reports_and_starts_again():
    acc = MoELoadAccumulator(L, E)
    metrics: dict = {"kept": 1.0}
    acc.add_to_metrics(metrics)
    assert metrics == {
        "kept": 1.0,
        "rollout/moe/routed_experts_found": 0.0,
        "rollout/moe/routed_expert_assignments": 0.0,
    }
    acc.update_rows(torch.tensor([[[0, 0], [1, 1]]]))
    acc.add_to_metrics(metrics)
    assert metrics["rollout/moe/routed_experts_found"] == 1.0
    assert metrics["rollout/moe/routed_expert_assignments"] == 4.0 and metrics["rollout/moe/max_vio/max"] == 3.0
    assert int(acc.counts.sum()) == 0 and "rollout/moe/drift/max" not in metrics
    acc.update_rows(torch.tensor([[[0, 0], [2, 1]]]))
    acc.add_to_metrics(metrics)
    assert metrics["rollout/moe/drift/max"] == 0.5 and metrics["rollout/moe/drift/avg"] == 0.25


def test_shapes_that_do_not_fit_are_errors_that_say_which():
    acc = MoELoadAccumulator(L, E)
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        acc.update(torch.zeros(2, 5, L, dtype=torch.long), mask)
    with pytest.raises(ValueError, match="wider"):
        acc.update(routing(2, 2), mask)
    with pytest.raises(ValueError, match="3 layers, but the accumulator has 2"):
        acc.update(torch.zeros(2, 3, 3, K, dtype=torch.long), mask)
    with pytest.raises(ValueError, match="need 9 routing rows, got 5"):
        acc.update_trajectory(routing(1, 5)[0], 10)
    with pytest.raises(ValueError, match="cannot be merged"):
        acc.merge(MoELoadAccumulator(L, E + 1))
    acc.update(routing(2, 3), torch.zeros(2, 0, dtype=torch.bool))
    assert acc.compute() == {}


def test_16_by_8_ranks_merge_to_the_single_count():
    routed = routing(128, 7, torch.uint8)
    mask = torch.rand(128, 5, generator=torch.Generator().manual_seed(1)) < 0.8
    single, merged = MoELoadAccumulator(L, E), MoELoadAccumulator(L, E)
    single.update(routed, mask)
    for rank in range(128):
        of_rank = MoELoadAccumulator(L, E)
        of_rank.update(routed[rank : rank + 1], mask[rank : rank + 1])
        merged.merge(of_rank)
    assert torch.equal(single.counts, merged.counts) and single.compute() == merged.compute()


def _reduce_on_rank(rank: int, port_file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    acc = MoELoadAccumulator(L, E)
    acc.update_rows(torch.full((rank + 1, L, K), 3 * rank))
    acc.update_rows(torch.full((1, L, K), -1))
    acc.all_reduce()
    assert acc.counts.tolist() == [[2, 0, 0, 4]] * L and acc.invalid == 2 * L * K
    dist.destroy_process_group()


def test_ranks_merge_in_one_all_reduce(tmp_path):
    mp.start_processes(_reduce_on_rank, (str(tmp_path / "rendezvous"),), 2, start_method="fork")


def test_scratch_memory_does_not_grow_with_the_tokens(monkeypatch):
    widened = []
    count = torch.bincount
    monkeypatch.setattr(torch, "bincount", lambda cells, **kw: widened.append(cells.numel()) or count(cells, **kw))
    acc = MoELoadAccumulator(48, 128)
    acc.update(torch.zeros(4, 2_001, 48, 8, dtype=torch.uint8), torch.ones(4, 2_001, dtype=torch.bool))
    acc.update_layer(0, torch.zeros(100_000, 8, dtype=torch.int16))
    assert sum(widened) == 4 * 2_000 * 48 * 8 + 800_000 and max(widened) <= CPU_CHUNK


def test_routing_disagreement_ignores_order_and_names_layers():
    a = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    b = torch.tensor([[[1, 0], [2, 0]], [[1, 0], [1, 0]]], dtype=torch.uint8)
    got = compute(routing_disagreement(a, b))
    assert got == {
        "training/moe/routing_disagreement/layer_0": 0.0,
        "training/moe/routing_disagreement/layer_1": 0.75,
        "training/moe/routing_disagreement/max": 0.75,
        "training/moe/routing_disagreement/avg": 0.375,
    }
    halves = merge(routing_disagreement(a[:1], b[:1]), routing_disagreement(a[1:], b[1:]))
    assert compute(halves) == got
    assert routing_disagreement(a[:0], b[:0]) == {}
    with pytest.raises(ValueError, match="one shape"):
        routing_disagreement(a, b[:1])


def test_source_distance():
    rollout, training = MoELoadAccumulator(1, 2), MoELoadAccumulator(1, 2, "training/moe")
    rollout.update_rows(torch.tensor([[[0]], [[1]]]))
    training.update_rows(torch.tensor([[[0]]]))
    assert source_distance(rollout, training)["training/moe/rollout_distance/max"] == 0.5
