"""Tiny random Hugging Face models of every family, saved once per test session, for tests to compare with."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.tables import hf_shapes, mtp_copies

BASE: dict[str, Any] = dict(
    vocab_size=211,  # odd: the padded vocabulary is used
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    initializer_range=0.1,
)
MOE = dict(moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2)
MLA = dict(
    vocab_size=211,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    max_position_embeddings=256,
    initializer_range=0.1,
    num_mtp_layers=0,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**BASE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**BASE, head_dim=16, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**BASE, **MOE, head_dim=16, norm_topk_prob=True),
    "qwen3_moe_sparse": Qwen3MoeConfig(**BASE, **MOE, head_dim=16, norm_topk_prob=False, mlp_only_layers=[1]),
    "llama": LlamaConfig(**BASE, rope_parameters=LLAMA3_ROPE),
    "llama_kv1": LlamaConfig(**(BASE | {"num_key_value_heads": 1}), tie_word_embeddings=True),
    "mixtral": MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Config(**MLA),
    "deepseek_v3_yarn": DeepseekV3Config(**MLA, rope_parameters=YARN),
    "moonlight": DeepseekV3Config(**(MLA | dict(q_lora_rank=None, n_group=1, topk_group=1))),
}


@cache
def saved(name: str) -> Path:
    """Directory of the model `name`, float32, every parameter random (norms, biases and router bias included)."""
    path = Path(mkdtemp(prefix=f"hf-{name}-"))
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * (0.1 if "correction" not in key else 0.3))
    model.save_pretrained(path)
    return path


@cache
def saved_with_mtp(name: str) -> Path:
    """The model `name` with one more layer that predicts further tokens, as DeepSeek-V3's checkpoint has it."""
    path = Path(mkdtemp(prefix=f"hf-{name}-mtp-"))
    shutil.copytree(saved(name), path, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    arch = replace(Architecture.from_dir(path), mtp_layers=1)
    generator = torch.Generator().manual_seed(1)
    for key, shape in hf_shapes(arch).items():
        if key not in tensors:
            tensors[key] = torch.randn(shape, generator=generator)
    tensors |= {copy: tensors[of].clone() for copy, of in mtp_copies(arch).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
