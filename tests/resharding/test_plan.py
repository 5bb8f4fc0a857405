"""Plans executed on arrays: every element arrives once, from somewhere that holds it, and replicas share the work."""

import time
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.slices import Layout, Slice
from megatron_dapo.models.tables import hf_shapes, megatron_slices
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.resharding.layouts import extents, index_in_storage, storage_box
from megatron_dapo.resharding.plan import Plan, PlanError, plan, subtract
from megatron_dapo.resharding.rollout_layout import rollout_layouts
from megatron_dapo.resharding.stats import plan_stats

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "norm_topk_prob": True,
}
SIZE_30B = {"num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
SIZE_235B = {"num_hidden_layers": 94, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536}

Storages = dict[str, np.ndarray]


def values(tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    """A different number for every element of every tensor."""
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape) + 1000000 * (sum(map(ord, tensor)) % 997 + 1)


def fill(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> Storages:
    """The storages of a holder, filled with what its layout says."""
    storages = {name: np.full(shape, -1, np.int64) for name, shape in extents(layout).items()}
    for piece in layout:
        box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))
        place = index_in_storage(piece, piece.offset, piece.shape)
        storages[piece.param][place] = values(piece.tensor, shapes[piece.tensor])[box].reshape(storage_box(piece)[1])
    return storages


def execute(
    made: Plan, sources: Mapping[int, Layout], destinations: Mapping[int, Layout], shapes: Mapping
) -> dict[int, Storages]:
    held = {rank: fill(layout, shapes) for rank, layout in sources.items()}
    got = {
        d: {name: np.full(shape, -1, np.int64) for name, shape in extents(layout).items()}
        for d, layout in destinations.items()
    }
    for rank in sources:
        for t in made.sends(rank):
            ours, theirs = sources[rank][t.source_slice], destinations[t.destination][t.destination_slice]
            place = index_in_storage(theirs, t.offset, t.shape)
            target = got[t.destination][theirs.param]
            assert (target[place] == -1).all(), "an element was sent twice"
            target[place] = held[rank][ours.param][index_in_storage(ours, t.offset, t.shape)].reshape(
                target[place].shape
            )
    return got


def check(
    sources: Mapping[int, Layout], destinations: Mapping[int, Layout], shapes: Mapping[str, tuple[int, ...]]
) -> Plan:
    made = plan(sources, destinations)
    got = execute(made, sources, destinations, shapes)
    for d, layout in destinations.items():
        for name, expected in fill(layout, shapes).items():
            np.testing.assert_array_equal(got[d][name], expected, err_msg=f"destination {d}, storage {name}")
    assert sum(len(made.receives(d)) for d in destinations) == len(made.pair)
    stats = plan_stats(made, sources, destinations)
    assert stats.bytes_moved == stats.bytes_lower_bound
    return made


def tiny(family: str) -> Architecture:
    base = {
        "num_hidden_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 8,
        "head_dim": 2,
        "intermediate_size": 24,
        "vocab_size": 131,
    }
    if family == "Qwen3MoeForCausalLM":
        moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_key_value_heads": 4}
        return Architecture.from_hf({"architectures": [family], **base, **moe})
    if family == "Qwen2ForCausalLM":
        return Architecture.from_hf(
            {"architectures": [family], **base, "num_key_value_heads": 2, "tie_word_embeddings": True}
        )
    return Architecture.from_hf({"architectures": [family], **base, "num_key_value_heads": 8})


@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"world": 1},
        {"world": 2, "tensor": 2},
        {"world": 8, "tensor": 2, "pipeline": 2},
        {"world": 8, "tensor": 2, "pipeline": 2, "virtual_pipeline": 2},
        {"world": 8, "context": 2, "pipeline": 2},
    ],
)
@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
def test_megatron_to_vllm(family: str, sizes: dict[str, int], rollout_tp: int) -> None:
    arch, topology = tiny(family), Topology(**sizes)
    sources = {rank: megatron_slices(arch, topology, rank) for rank in range(topology.world)}
    engine = rollout_layouts(arch, rollout_tp)
    destinations = {e * rollout_tp + r: engine[r] for e in range(2) for r in range(rollout_tp)}
    check(sources, destinations, hf_shapes(arch))


@pytest.mark.parametrize("expert_tensor", [1, 2])
@pytest.mark.parametrize("expert_parallel_rollout", [False, True])
def test_expert_parallel_megatron_to_vllm(expert_tensor: int, expert_parallel_rollout: bool) -> None:
    arch = tiny("Qwen3MoeForCausalLM")
    topology = Topology(world=8, tensor=2, pipeline=2, expert=2, expert_tensor=expert_tensor)
    sources = {rank: megatron_slices(arch, topology, rank) for rank in range(8)}
    check(sources, dict(enumerate(rollout_layouts(arch, 4, expert_parallel_rollout))), hf_shapes(arch))


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[dict, dict[int, Layout], dict[int, Layout]]:
    """Tensors cut into grids for the sources (each cell with one or more holders) and boxes for the destinations."""
    shapes: dict[str, tuple[int, ...]] = {}
    sources: dict[int, list[Slice]] = {r: [] for r in range(draw(st.integers(1, 4)))}
    destinations: dict[int, list[Slice]] = {d: [] for d in range(draw(st.integers(1, 3)))}
    for t in range(draw(st.integers(1, 3))):
        name = f"t{t}"
        shape = shapes[name] = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=2)))
        cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
        cells = [()]
        for cut in cuts:
            cells = [(*cell, span) for cell in cells for span in pairwise(cut)]
        for c, cell in enumerate(cells):
            low, size = tuple(a for a, _ in cell), tuple(b - a for a, b in cell)
            for rank in draw(st.sets(st.sampled_from(sorted(sources)), min_size=1)):
                sources[rank].append(Slice(name, low, size, f"{name}.{c}", (0,) * len(shape)))
        for d in destinations:
            low = tuple(draw(st.integers(0, n - 1)) for n in shape)
            size = tuple(draw(st.integers(1, n - a)) for a, n in zip(low, shape, strict=True))
            destinations[d].append(Slice(name, low, size, f"w{t}", (0, *(0,) * len(shape))))
    return shapes, {r: tuple(s) for r, s in sources.items()}, {d: tuple(s) for d, s in destinations.items()}


@settings(max_examples=60, deadline=None)
@given(cut_tensors())
def test_any_cut(case: tuple[dict, dict[int, Layout], dict[int, Layout]]) -> None:
    shapes, sources, destinations = case
    check(sources, destinations, shapes)


def test_unequal_overlapping_sources_do_not_send_twice() -> None:
    shapes = {"w": (6, 4)}
    sources = {
        0: (Slice("w", (0, 0), (4, 4), "a", (0, 0)),),
        1: (Slice("w", (2, 0), (4, 4), "b", (0, 0)),),
        2: (Slice("w", (1, 1), (3, 2), "c", (0, 0)),),
    }
    check(sources, {7: (Slice("w", (0, 0), (6, 4), "w", (0, 0)),)}, shapes)


def test_subtract_leaves_the_rest_in_boxes() -> None:
    part, hole = ((0, 0, 0), (4, 4, 1)), ((1, 1, 0), (3, 9, 1))
    rest = subtract(part, hole)
    cells = [(i, j) for low, high in rest for i in range(low[0], high[0]) for j in range(low[1], high[1])]
    assert sorted(cells) == sorted(
        {(i, j) for i in range(4) for j in range(4)} - {(i, j) for i in (1, 2) for j in (1, 2, 3)}
    )
    assert subtract(part, ((4, 0, 0), (5, 4, 1))) == [part]


def test_what_nobody_holds_is_named() -> None:
    destination = {0: (Slice("model.norm.weight", (0,), (8,), "n", (0,)),)}
    with pytest.raises(PlanError, match=r"model\.norm\.weight\[0:8.*0 of 8"):
        plan({0: (Slice("other", (0,), (8,), "o", (0,)),)}, destination)
    with pytest.raises(PlanError, match=r"model\.norm\.weight.*6 of 8"):
        plan({0: (Slice("model.norm.weight", (0,), (6,), "n", (0,)),)}, destination)
    with pytest.raises(PlanError, match=r"model\.norm\.weight has 1 dimensions in one layout and 2"):
        plan({0: (Slice("model.norm.weight", (0, 0), (8, 1), "n", (0, 0)),)}, destination)


def test_replicas_share_the_sending() -> None:
    """Four holders of the same tensors of very different sizes, one reader: loads differ by at most one tensor."""
    sizes = [100, 7, 7, 1, 50, 50, 3, 100, 100, 2, 100, 50, 50]
    layout = tuple(Slice(f"t{i}", (0,), (n,), f"t{i}", (0,)) for i, n in enumerate(sizes))
    made = check(dict.fromkeys(range(4), layout), {0: layout}, {f"t{i}": (n,) for i, n in enumerate(sizes)})
    load = np.bincount(made.source, made.elements)
    assert load.max() - load.min() <= 100
    assert load.max() / load.mean() <= 1.1


@pytest.mark.parametrize(
    ("model", "first", "limit"),
    [(QWEN3_MOE | SIZE_30B, None, 1.0), (QWEN3_MOE | SIZE_235B | {"num_attention_heads": 64}, 23, 3.0)],
)
def test_large_models_are_planned_in_a_moment(model: dict, first: int | None, limit: float) -> None:
    """16 x 8 trainer ranks (TP4, PP4, EP8) to 16 engines of TP8; processor time, for the machine may be busy."""
    arch = Architecture.from_hf(model)
    topology = Topology(world=128, tensor=4, pipeline=4, expert=8, first_stage_layers=first, last_stage_layers=first)
    sources = {rank: megatron_slices(arch, topology, rank) for rank in range(128)}
    engine = rollout_layouts(arch, 8)
    destinations = {e * 8 + r: engine[r] for e in range(16) for r in range(8)}
    start = time.process_time()
    made = plan(sources, destinations)
    assert time.process_time() - start < limit
    stats = plan_stats(made, sources, destinations)
    assert stats.ratio <= 1.02
    assert stats.send_max_over_mean <= 1.1
    assert stats.naive_bytes / stats.bytes_moved > 6


def test_a_rollout_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=3 does not divide the 8 attention heads, nor .*width 8"
    ):
        rollout_layouts(tiny("Qwen3MoeForCausalLM"), 3)
    with pytest.raises(ValueError, match="experts"):
        rollout_layouts(tiny("Qwen3MoeForCausalLM"), 16, expert_parallel=True)
