"""Closed-form parameter counts against the slice table (every rank, exactly) and the published model sizes."""

from math import prod

import pytest

from megatron_dapo.errors import UserError
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.tables import hf_shapes, megatron_slices
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.planner.networks import NETWORKS, bundled_name, network
from megatron_dapo.planner.parameters import Parameters, engine_parameters, rank_parameters, total_parameters
from megatron_dapo.resharding.layouts import extents
from megatron_dapo.resharding.rollout_layout import rollout_layouts

BASE = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "vocab_size": 211}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
V3 = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TINY = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **BASE, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        **BASE,
        **MOE,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "mlp_only_layers": [1],
    },
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **BASE, **MLA, **V3, "moe_intermediate_size": 16},
    "moonlight": {
        "architectures": ["DeepseekV3ForCausalLM"],
        **BASE,
        **(MLA | {"q_lora_rank": None}),
        **V3,
        "moe_intermediate_size": 16,
    },
    "llama_kv1": {"architectures": ["LlamaForCausalLM"], **BASE, "num_key_value_heads": 1},
}
LAYOUTS = [
    {},
    {"tensor": 2},
    {"tensor": 4},
    {"pipeline": 2},
    {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2},
    {"pipeline": 4, "first_stage_layers": 1},
    {"context": 2, "tensor": 2},
    {"expert": 4},
    {"expert": 2, "tensor": 2, "pipeline": 2},
    {"expert": 2, "expert_tensor": 2, "tensor": 2},
]
PUBLISHED = {
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,  # without the multi-token prediction module, with the router biases
    "smollm2-135m": 134_515_008,
}


def stored(arch: Architecture, topology: Topology, rank: int, value_head: bool) -> Parameters:
    """What the slice table says, with the padding rows that it leaves out of the vocabulary."""
    dense = expert = buffers = 0
    padding = {}
    for piece in megatron_slices(arch, topology, rank, value_head=value_head):
        if "expert_bias" in piece.param:
            buffers += piece.numel
        elif ".experts." in piece.param:
            expert += piece.numel
        else:
            dense += piece.numel
        if "word_embeddings" in piece.param or (piece.tensor in ("lm_head.weight", "model.embed_tokens.weight")):
            padding[piece.param] = piece.shape[0]
    rows = -(-arch.vocab // 128) * 128 // topology.tensor
    return Parameters(dense + sum(rows - have for have in padding.values()) * arch.hidden, expert, buffers)


def fits(family: str, sizes: dict) -> bool:
    return sizes.get("expert", 1) == 1 or family in ("qwen3_moe", "deepseek_v3", "moonlight")


@pytest.mark.parametrize("value_head", [False, True])
@pytest.mark.parametrize(("family", "sizes"), [(f, s) for f in TINY for s in LAYOUTS if fits(f, s)], ids=str)
def test_every_rank_holds_what_the_table_says(family: str, sizes: dict, value_head: bool):
    arch, topology = Architecture.from_hf(TINY[family]), Topology(world=8, **sizes)
    for at in topology.coordinates():
        assert rank_parameters(arch, topology, at.pp, value_head) == stored(arch, topology, at.rank, value_head)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("family", TINY)
def test_engine_ranks_hold_what_vllm_stores(family: str, tensor: int):
    arch = Architecture.from_hf(TINY[family])
    assert engine_parameters(arch, tensor) == sum(piece.numel for piece in rollout_layouts(arch, tensor)[0])
    assert extents(rollout_layouts(arch, tensor)[0])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str):
    assert total_parameters(network(name)) == PUBLISHED[name]


@pytest.mark.parametrize("arch", [*map(network, NETWORKS), *map(Architecture.from_hf, TINY.values())], ids=str)
def test_all_parameters_are_those_of_the_checkpoint(arch: Architecture):
    assert total_parameters(arch) == sum(prod(shape) for shape in hf_shapes(arch).values())


def test_names_of_directories(tmp_path):
    assert bundled_name("models/Qwen3-30B-A3B-Base") == "qwen3-30b-a3b"
    assert bundled_name("models/DeepSeek-V3-Base-bf16") == "deepseek-v3"
    assert bundled_name("qwen2_5_32b") == "qwen2.5-32b"
    assert bundled_name("models/else") is None
    assert set(NETWORKS) >= set(PUBLISHED)
    with pytest.raises(UserError, match="no bundled network"):
        network("models/else")
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(UserError, match="GPT2"):
        network(str(tmp_path))
