"""The slice table alone: HF tensors cut for every rank of a layout and put together again are bit-identical."""

from dataclasses import replace
from itertools import groupby

import pytest
import torch

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.storage import box
from megatron_dapo.models.tables import hf_shapes, megatron_slices, mtp_copies, padded_vocab
from megatron_dapo.parallel.topology import Topology
from tests.models.hf_models import CONFIGS

LAYOUTS = {
    "one": Topology(),
    "tp2_pp2": Topology(world=4, tensor=2, pipeline=2),
    "tp4": Topology(world=4, tensor=4),
    "ep4_etp1": Topology(world=4, expert=4),
    "tp2_ep2_pp2_vpp2": Topology(world=8, tensor=2, pipeline=2, virtual_pipeline=2, expert=2),
    "tp4_ep2_etp2": Topology(world=4, tensor=4, expert=2, expert_tensor=2),
    "uneven_pp3": Topology(world=3, pipeline=3, first_stage_layers=1, last_stage_layers=1),
    "layout_string": Topology(world=2, pipeline=2, virtual_pipeline=2, pipeline_layout="Et|tt|t|L"),
}


def architecture(name: str, **changes) -> Architecture:
    return replace(Architecture.from_hf(CONFIGS[name].to_dict()), **changes)


def hf_tensors(shapes):
    tensors, start = {}, 1
    for name, shape in shapes.items():
        tensors[name] = torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
        start += tensors[name].numel()
    return tensors


def local_storages(layout, tensors):
    """Fill each storage from the HF tensors; no element may be written twice."""
    storages = {}
    for param, group in groupby(sorted(layout, key=lambda s: s.param), key=lambda s: s.param):
        pieces = list(group)
        shape = [max(p.param_offset[d] + p.shape[d] for p in pieces) for d in range(len(pieces[0].shape))]
        storage = torch.zeros(shape, dtype=torch.long)
        for p in pieces:
            place = box(storage, p.param_offset, p.shape)
            assert not place.any(), f"{param}: a box is written twice"
            place.copy_(box(tensors[p.tensor], p.offset, p.shape))
        assert storage.all(), f"{param} has a hole inside its boxes"
        storages[param] = storage
    return storages


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name, layout, te):
    arch = architecture(name)
    there_and_back(arch, legal(LAYOUTS[layout], arch), te)


def there_and_back(arch: Architecture, topology: Topology, te: bool = False) -> dict[str, set[int]]:
    """Cut every HF tensor for every rank, put the cuts together again, compare; returns the rows of each storage."""
    tensors = hf_tensors(hf_shapes(arch))
    back = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    rows: dict[str, set[int]] = {}
    for at in topology.coordinates():
        slices = megatron_slices(arch, topology, at, te=te)
        storages = local_storages(slices, tensors)
        for param, storage in storages.items():
            rows.setdefault(param, set()).add(storage.shape[0])
        for s in slices:
            box(back[s.tensor], s.offset, s.shape).copy_(box(storages[s.param], s.param_offset, s.shape))
    for key, tensor in tensors.items():
        assert torch.equal(back[key], tensor), key
    return rows


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("vocab", [1, 127, 128, 211, 1000])
@pytest.mark.parametrize("tied", [False, True])
def test_kv_heads_and_odd_vocabularies(kv_heads, vocab, tied):
    arch = architecture("qwen2", kv_heads=kv_heads, vocab=vocab, tied=tied)
    for topology in (Topology(world=4, tensor=4), Topology(world=8, tensor=4, pipeline=2)):
        rows = there_and_back(arch, topology)
        fused = set.union(*(found for param, found in rows.items() if param.endswith("linear_qkv.weight")))
        assert fused == {(arch.heads + 2 * kv_heads) * arch.head_dim // 4}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("llama_kv1", "deepseek_v3_yarn")])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_family_in_every_layout_tied_or_not(name, tied):
    """With one, two and eight KV heads (latent attention has none) and an odd vocabulary that no layout divides."""
    base = architecture(name, tied=tied, vocab=97)
    variants = [base] if base.latent else [replace(base, kv_heads=kv_heads) for kv_heads in (1, 2, 8)]
    for layout in ("one", "tp2_pp2", "tp4", "ep4_etp1", "tp2_ep2_pp2_vpp2"):
        for arch in variants:
            there_and_back(arch, legal(LAYOUTS[layout], arch))


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("name", ["deepseek_v3", "moonlight"])
def test_layers_that_predict_further_tokens(name, te):
    arch = architecture(name, mtp_layers=2)
    assert hf_shapes(arch)["model.layers.5.eh_proj.weight"] == (32, 64)
    assert mtp_copies(arch)["model.layers.4.shared_head.head.weight"] == "lm_head.weight"
    for layout in ("one", "tp2_pp2", "tp4", "ep4_etp1", "tp2_ep2_pp2_vpp2"):
        there_and_back(arch, LAYOUTS[layout], te)


def legal(topology: Topology, arch: Architecture) -> Topology:
    """Without expert parallelism where there are no experts."""
    return topology if arch.mixture else replace(topology, expert=1, expert_tensor=None)


def test_tied_embedding_lies_on_both_pipeline_ends():
    arch = architecture("qwen2")
    first, last = (
        {
            s.param
            for s in megatron_slices(arch, Topology(world=2, pipeline=2), r)
            if s.tensor.endswith("embed_tokens.weight")
        }
        for r in (0, 1)
    )
    assert first == {"0.embedding.word_embeddings.weight"}
    assert last == {"0.output_layer.weight"}
    assert "lm_head.weight" not in hf_shapes(arch)


def test_padding_is_the_same_under_every_tensor_size():
    assert {padded_vocab(211, tp) for tp in (1, 2, 4, 8, 64)} == {256}


def test_critic_has_a_score_head_instead_of_the_vocabulary():
    arch = architecture("qwen2")
    params = {s.param: s.tensor for s in megatron_slices(arch, Topology(world=2, pipeline=2), 1, value_head=True)}
    assert params["0.output_layer.weight"] == "score.weight"


def test_illegal_layouts_name_everything_at_once():
    arch = architecture("qwen3_moe")
    with pytest.raises(ValueError, match="not divisible") as error:
        megatron_slices(arch, Topology(world=9, tensor=3, expert=3, pipeline=3), 0)
    for part in ("8 attention heads", "8 experts", "4 layers", "nearest legal"):
        assert part in str(error.value)


def test_replicas_share_one_description():
    arch, topology = architecture("llama"), Topology(world=4, context=2)
    assert megatron_slices(arch, topology, 0) is megatron_slices(arch, topology, 3)


def test_the_hf_names_are_transformers_own(tmp_path):
    from safetensors import safe_open

    from tests.models.hf_models import saved

    for name in CONFIGS:
        with safe_open(saved(name) / "model.safetensors", "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        assert shapes == hf_shapes(Architecture.from_dir(saved(name)))
