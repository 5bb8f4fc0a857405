"""Reading config.json: every family's numbers, and a refusal for what would silently compute something else."""

import json

import pytest

from megatron_dapo.models.architecture import FAMILIES, Architecture, UnsupportedModel
from tests.models.hf_models import BASE, CONFIGS, MLA


def config(name, **changes):
    return CONFIGS[name].to_dict() | {"architectures": [FAMILIES[CONFIGS[name].model_type]]} | changes


def test_every_family_is_read():
    assert {Architecture.from_hf(config(name)).family for name in CONFIGS} == set(FAMILIES)


def test_mixture_layers_and_routing():
    sparse = Architecture.from_hf(config("qwen3_moe_sparse"))
    assert sparse.mixture.layers == (0, 2, 3) and not sparse.mixture.normalise
    deep = Architecture.from_hf(config("deepseek_v3"))
    assert deep.mixture.layers == (1, 2, 3) and deep.mixture.shared_ffn == 32 and deep.mixture.sigmoid
    assert deep.head_dim == 16 and deep.latent.q_rank == 24
    assert Architecture.from_hf(config("moonlight")).latent.q_rank is None


def test_old_and_new_rope_spelling_agree():
    new = Architecture.from_hf(config("llama"))
    old = config("llama")
    scaling = old.pop("rope_parameters")
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    assert Architecture.from_hf(old).rope == new.rope and new.rope.kind == "llama3"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"architectures": ["GPT2LMHeadModel"]},
            "unsupported architecture 'GPT2LMHeadModel'.*Qwen3MoeForCausalLM",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "attention_bias true.*mlp_bias true"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16}, "sliding window"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'linear' with latent attention",
        ),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
    ],
)
def test_refusals(name, changes, message):
    with pytest.raises(ValueError, match=message):
        Architecture.from_hf(config(name, **changes))


def test_directory_without_config(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        Architecture.from_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config("llama")))
    assert Architecture.from_dir(tmp_path).vocab == BASE["vocab_size"] == MLA["vocab_size"]
