"""The memory model against what a real engine on this host allocates, and its own arithmetic."""

import pytest

from megatron_dapo.config import load_config
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.planner.activations import Pack, chunks_in_flight, layer_bytes
from megatron_dapo.planner.assumptions import Assumptions
from megatron_dapo.planner.devices import device
from megatron_dapo.planner.memory import engine_memory, kv_bytes_per_token, role_memory, stage_activations
from megatron_dapo.planner.networks import network
from megatron_dapo.planner.parameters import Parameters, rank_parameters

DEMO = network("demo")


def test_bytes_of_a_role():
    """bf16: 2 + 4 + 12 per parameter, the 12 over the data-parallel ranks of its kind; float32: 4 + 4 + 8."""
    topology = Topology(world=8, tensor=2, expert=4)
    role = role_memory(Parameters(dense=100, expert=40), topology, "bfloat16")
    assert (role.parameters, role.gradients) == (280, 560)
    assert role.optimizer == 12 * (100 / 4 + 40 / 2)
    assert role_memory(Parameters(dense=100), Topology(world=1), "float32").total == 1600


def test_full_recomputation_keeps_one_input_per_layer():
    config = load_config(["model.recompute=full", "model.path=demo"])
    pack = Pack.of(1000, Topology(), False, 2)
    kept, single = stage_activations(config, DEMO, Topology(), 0, pack, 4, Assumptions())
    assert kept == 4 * 1000 * 128 * 2
    assert single == layer_bytes(DEMO, Topology(), pack, True, frozenset(), 1.2)


def test_micro_batches_in_flight():
    plain = Topology(world=4, pipeline=4)
    assert [chunks_in_flight(plain, pp, 8) for pp in range(4)] == [4, 3, 2, 1]
    assert [chunks_in_flight(plain, pp, 2) for pp in range(4)] == [2, 2, 2, 1]
    interleaved = Topology(world=4, pipeline=4, virtual_pipeline=2)
    assert chunks_in_flight(interleaved, 0, 8) == (2 * 3 + 4 + 1) / 2


def test_what_is_cut_and_what_is_recomputed():
    arch = network("qwen3-30b-a3b")
    one, four = Topology(world=8), Topology(world=8, tensor=4, expert=8)
    whole = layer_bytes(arch, one, Pack.of(8192, one, False, 2), True, frozenset(), 1.0)
    cut = layer_bytes(arch, four, Pack.of(8192, four, True, 2), True, frozenset(), 1.0)
    assert cut == pytest.approx(whole / 4)  # sequence parallel: everything of a layer is cut
    less = layer_bytes(arch, four, Pack.of(8192, four, True, 2), True, frozenset({"moe"}), 1.0)
    assert less < cut / 2


def test_keys_and_values():
    assert kv_bytes_per_token(network("qwen2.5-32b"), 1, 2) == 2 * 8 * 128 * 64 * 2
    assert (
        kv_bytes_per_token(network("qwen3-30b-a3b"), 8, 2) == 2 * 1 * 128 * 48 * 2
    )  # 4 KV heads are copied to 8 ranks
    assert kv_bytes_per_token(network("deepseek-v3"), 32, 2) == 576 * 61 * 2
    config = load_config([], "dapo_qwen2_5_32b")
    engine = engine_memory(config, network("qwen2.5-32b"), device("H100"), Assumptions())
    assert engine.kv_room == pytest.approx(0.8 * device("H100").memory - engine.weights - 3 * 2**30)
    assert engine.longest_sequences == int(engine.kv_room / engine.kv_bytes_per_token) // 22528


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "layout"), [("none", {}), ("full", {}), ("none", {"tensor": 2}), ("none", {"expert": 2})], ids=str
)
def test_measured_on_this_host(recompute: str, layout: dict[str, int]):
    """Bytes of parameters, gradient buffers, optimizer state and saved activations of a real update: within 5 %."""
    from tests.planner.measured import measure

    tokens = 2048
    ranks = measure(recompute, tokens, **layout)
    measured = {kind: sum(rank[kind] for rank in ranks) / len(ranks) for kind in ranks[0]}  # experts' loads differ
    topology = Topology(world=len(ranks), **layout)
    config = load_config([f"model.recompute={recompute}", "model.dtype=float32", "model.path=demo"])
    role = role_memory(rank_parameters(DEMO, topology, 0), topology, "float32")
    assert measured["parameters"] == pytest.approx(role.parameters, rel=0.05)
    assert measured["gradients"] == pytest.approx(role.gradients, rel=0.05)
    assert measured["optimizer"] == pytest.approx(role.optimizer, rel=0.05)
    pack = Pack.of(tokens, topology, topology.tensor > 1, 4, fused=False)
    kept, _ = stage_activations(config, DEMO, topology, 0, pack, 1, Assumptions(imbalance=1.0))
    kept += 2 * pack.input_bytes(DEMO)  # the final norm, which the plan counts with the head
    assert measured["activations"] == pytest.approx(kept, rel=0.05), f"{measured['activations'] / kept:.3f} x the model"
