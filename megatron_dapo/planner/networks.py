"""The networks that can be planned without a download: the published config.json numbers of the recipes' models."""

import json
from pathlib import Path
from typing import Any

from megatron_dapo.errors import UserError
from megatron_dapo.models.architecture import Architecture

_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "vocab_size": 152064}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv": "num_key_value_heads",
    "positions": "max_position_embeddings",
}


def _config(base: dict[str, Any], more: dict[str, Any] | None = None, **sizes: int) -> dict[str, Any]:
    return base | {_KEYS[name]: size for name, size in sizes.items()} | (more or {})


NETWORKS: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": _config(_QWEN2, layers=28, hidden=3584, ffn=18944, heads=28, kv=4, positions=131072),
    "qwen2.5-32b": _config(_QWEN2, layers=64, hidden=5120, ffn=27648, heads=40, kv=8, positions=131072),
    "qwen3-30b-a3b": _config(_QWEN3_MOE, {"moe_intermediate_size": 768}, layers=48, hidden=2048, ffn=6144, heads=32),
    "qwen3-235b-a22b": _config(
        _QWEN3_MOE, {"moe_intermediate_size": 1536}, layers=94, hidden=4096, ffn=12288, heads=64
    ),
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
    },
    "smollm2-135m": _config(
        {"architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "tie_word_embeddings": True, "rope_theta": 1e5},
        layers=30, hidden=576, ffn=1536, heads=9, kv=3, positions=8192,
    ),
    "demo": _config(
        {
            "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 128, "norm_topk_prob": True, "vocab_size": 300,
        },
        layers=4, hidden=128, ffn=256, heads=4, kv=2, positions=256,
    ),
}  # fmt: skip
_SUFFIXES = ("-base", "-instruct", "-bf16", "-chat")
_MADE_HERE = {"runs/demo/warm_start/hf": "demo", "runs/demo/init": "demo"}  # written by `megatron-dapo demo`


def bundled_name(path: str) -> str | None:
    """The bundled network that a model directory's name means ("models/Qwen3-30B-A3B-Base"), if any."""
    if path in _MADE_HERE:
        return _MADE_HERE[path]
    name = Path(path).name.lower().replace("_", "-")
    while name not in NETWORKS and name.endswith(_SUFFIXES):
        name = name.rpartition("-")[0]
    spelled = {known.replace(".", "-"): known for known in NETWORKS}
    return name if name in NETWORKS else spelled.get(name)


def network(path: str) -> Architecture:
    """The architecture of a Hugging Face directory, of a config.json, or of a bundled network.

    Raises UserError when it is none of them.
    """
    file = Path(path)
    if (file / "config.json").is_file() or (file.suffix == ".json" and file.is_file()):
        source = file if file.is_file() else file / "config.json"
        try:
            return Architecture.from_hf(json.loads(source.read_text()))
        except (ValueError, KeyError) as error:
            raise UserError(f"{source}: {error}") from error
    name = bundled_name(path) if path else None
    if name is None:
        raise UserError(
            f"model={path or '(nothing)'} is no directory with a config.json and no bundled network: "
            f"{', '.join(NETWORKS)}"
        )
    return Architecture.from_hf(NETWORKS[name])
