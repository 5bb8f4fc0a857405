"""Loads per GPU and node follow the placement, and better placements are better by the amount that is claimed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.metrics import Placement, megatron_placement, placement_metrics
from megatron_dapo.metrics.placement import EMPTY, gpu_load, greedy_placement, load_by, overhead

ZIPF = (1e5 / np.arange(1, 129)).astype(int)


def skewed(layers: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(ZIPF) for _ in range(layers)])


def cost(counts: np.ndarray, placement: Placement) -> float:
    return overhead(gpu_load(counts, placement), placement.holds)


def test_contiguous_blocks_on_16_by_8():
    placement = megatron_placement(2, 128, world=128, expert=128)
    assert placement.node[-1] == 15 and placement.slots[1, 37].tolist() == [37]
    counts = skewed(2)
    load = gpu_load(counts, placement)
    assert np.array_equal(load, counts)
    nodes = load_by(load, np.arange(128) // 8)
    assert nodes.shape == (2, 16) and nodes[0, 1] == counts[0, 8:16].sum()


def test_rank_order_with_expert_tensor_data_and_pipeline():
    placement = megatron_placement(4, 8, world=16, expert=2, expert_tensor=2, stage_layers=[[0, 1], [2, 3]])
    assert placement.ep_rank == (0, 0, 1, 1) * 4
    assert placement.slots[0, 0].tolist() == [0, 1, 2, 3] and placement.slots[0, 2].tolist() == [4, 5, 6, 7]
    assert (placement.slots[2, :8] == EMPTY).all() and (placement.slots[0, 8:] == EMPTY).all()
    counts = np.ones((4, 8), dtype=int)
    load = gpu_load(counts, placement)  # 2 expert-tensor ranks × 2 copies share each expert
    assert load[0, 0] == pytest.approx(4 / 4) and load[2, 0] == 0 and load.sum() == counts.sum()
    assert overhead(load, placement.holds) == pytest.approx(1.0)


def test_virtual_pipeline_layers_are_taken_as_listed():
    placement = megatron_placement(4, 4, world=4, expert=2, stage_layers=[[0, 2], [1, 3]])
    assert (placement.slots[[0, 2], 2:] == EMPTY).all() and (placement.slots[[1, 3], :2] == EMPTY).all()


def test_uneven_sizes_are_an_error_that_shows_them():
    with pytest.raises(ValueError, match="10 experts over expert=4"):
        megatron_placement(1, 10, world=4, expert=4)
    with pytest.raises(ValueError, match="world=6"):
        megatron_placement(1, 8, world=6, expert=4)


def test_metrics_name_the_slowest_gpu_and_its_cost():
    counts = np.array([[30, 10, 10, 10], [10, 10, 10, 10]])
    got = placement_metrics(counts, megatron_placement(2, 4, world=4, expert=4, gpus_per_node=2))
    assert got["rollout/moe/gpu_load/slowest"] == 0.0
    assert got["rollout/moe/gpu_load/max_over_mean"] == pytest.approx((30 + 10) / (15 + 10))
    assert got["rollout/moe/gpu_load/worst_layer"] == pytest.approx(2.0)
    assert got["rollout/moe/node_load/max_over_mean"] == pytest.approx((40 + 20) / (30 + 20))
    assert placement_metrics(np.zeros((2, 4), dtype=int), megatron_placement(2, 4, world=4, expert=4)) == {}


def test_idle_gpus_count_as_holders_even_when_their_experts_are_dead():
    counts = np.array([[10, 0]])
    assert cost(counts, megatron_placement(1, 2, world=2, expert=2)) == pytest.approx(2.0)


def test_an_expert_with_load_but_without_a_place_is_an_error():
    lonely = Placement(np.array([[[0], [1]]]), gpus_per_node=8, ep_rank=(0, 1))
    with pytest.raises(ValueError, match="expert 2 of layer 0"):
        gpu_load(np.array([[1, 1, 1]]), lonely)


def test_greedy_and_replicated_placements_are_valid_and_better():
    counts = skewed(3)
    plain = cost(counts, megatron_placement(3, 128, world=16, expert=16))
    greedy = greedy_placement(counts, 16, 8)
    copies = greedy_placement(counts, 16, 8, extra_slots=2)
    for layer in range(3):
        assert sorted(greedy.slots[layer].ravel().tolist()) == list(range(128))
        held = copies.slots[layer]
        assert set(held.ravel().tolist()) == set(range(128))
        assert all(len(set(gpu.tolist())) == len(gpu) for gpu in held)  # no GPU holds an expert twice
    assert gpu_load(counts, copies).sum() == pytest.approx(counts.sum())
    assert cost(counts, copies) < 1.02 < cost(counts, greedy) < plain


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_any_shape_of_fitted_placement_holds_every_expert(gpus, experts, extra, seed):
    counts = np.random.default_rng(seed).integers(0, 50, (2, experts))
    placement = greedy_placement(counts, gpus, 8, extra)
    load = gpu_load(counts, placement)
    assert load.sum() == pytest.approx(counts.sum()) and overhead(load, placement.holds) >= 1 - 1e-9


def test_equal_gpus_are_chosen_so_that_nodes_are_even():
    counts = skewed(1)
    plain, greedy = megatron_placement(1, 128, world=128, expert=128), greedy_placement(counts, 128, 8)

    def node_cost(placement: Placement) -> float:
        return overhead(load_by(gpu_load(counts, placement), placement.node), np.ones((1, 16), dtype=bool))

    assert node_cost(greedy) < node_cost(plain)
