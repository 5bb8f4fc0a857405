"""What a Hugging Face `config.json` says about the network, as plain numbers: the only reader of that file. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.errors import UserError

FAMILIES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


class UnsupportedModel(UserError, ValueError):
    """A model directory that this project cannot train; the text says why and what it can."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base period and, for scaled kinds ("linear", "llama3", "yarn"), the numbers they need."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V3): its dimensions; `q_rank` is None where queries are not compressed."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class Mixture:
    """The experts: their number, top-k, sizes, which layers have them, and how the router scores."""

    experts: int
    topk: int
    ffn: int
    layers: tuple[int, ...]
    shared_ffn: int = 0  # all shared experts together; 0 for none
    sigmoid: bool = False
    expert_bias: bool = False
    normalise: bool = True  # the k chosen probabilities sum to one
    scale: float = 1.0
    groups: int = 1
    group_topk: int = 1


@dataclass(frozen=True)
class Architecture:
    """One network. `ffn` is the dense layers' feed-forward size; `mixture` and `latent` are None where not used.

    `mtp_layers`: layers behind the last that predict further tokens (DeepSeek-V3). They are part of checkpoints but not
    of what is trained, so config.json does not set it: `checkpoint_tools` do, for a checkpoint that has them.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    norm_eps: float
    max_positions: int
    rope: Rope
    qkv_bias: bool = False
    qk_norm: bool = False
    mixture: Mixture | None = None
    latent: Latent | None = None
    mtp_layers: int = 0

    @property
    def experts(self) -> int:
        """Routed experts per mixture layer; 0 for a dense model."""
        return self.mixture.experts if self.mixture else 0

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) has experts. Those behind the last are built like the last."""
        return self.mixture is not None and min(layer, self.layers - 1) in self.mixture.layers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Architecture":
        """Read a config.json's content.

        Raises ValueError naming what this project cannot represent: an unknown family, or a variant of a known one
        (biases, sliding windows, other activations, unknown rope kinds) that would silently compute something else.
        """
        family = _family(config)
        _refuse_unsupported(family, config)
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        latent = _latent(config) if family == "deepseek_v3" else None
        return cls(
            family=family,
            layers=layers,
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=heads if latent else config.get("num_key_value_heads") or heads,
            head_dim=latent.nope_dim + latent.rope_dim
            if latent
            else config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            max_positions=config.get("max_position_embeddings", 4096),
            rope=_rope(config),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            mixture=_mixture(family, config),
            latent=latent,
        )

    @classmethod
    def from_dir(cls, path: str | Path) -> "Architecture":
        """Read `config.json` of a Hugging Face directory. Raises UnsupportedModel naming the directory."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise UnsupportedModel(f"{path} is not a Hugging Face model directory: it has no config.json")
        return cls.from_hf(json.loads(file.read_text()))


def _family(config: Mapping[str, Any]) -> str:
    named = (config.get("architectures") or [None])[0]
    for family, architecture in FAMILIES.items():
        if named == architecture or (named is None and config.get("model_type") == family):
            return family
    raise UnsupportedModel(
        f"unsupported architecture {named or config.get('model_type')!r}; supported are {', '.join(FAMILIES.values())}"
    )


def _refuse_unsupported(family: str, config: Mapping[str, Any]) -> None:
    wrong = []
    if config.get("hidden_act", "silu") != "silu":
        wrong.append(f"hidden_act {config['hidden_act']!r} (only silu)")
    if config.get("attention_bias") and family != "qwen2":
        wrong.append("attention_bias true (only Qwen2's QKV bias)")
    if config.get("mlp_bias"):
        wrong.append("mlp_bias true")
    window = config.get("sliding_window") if config.get("use_sliding_window", family == "mixtral") else None
    if window and window < config.get("max_position_embeddings", 0):
        wrong.append(f"sliding window attention ({window} tokens)")
    if family == "deepseek_v3":
        if config.get("rope_interleave") is False:
            wrong.append("rope_interleave false")
        if config.get("norm_topk_prob") is False:
            wrong.append("norm_topk_prob false with sigmoid routing")
        groups, chosen, topk = config.get("n_group") or 1, config.get("topk_group") or 1, config["num_experts_per_tok"]
        if groups > 1 and topk != 2 * chosen:
            wrong.append(f"topk_group {chosen} with num_experts_per_tok {topk} (a group is scored by its best two)")
        if (rope := _rope(config).kind) in ("linear", "llama3"):
            wrong.append(f"rope_type {rope!r} with latent attention (only default and yarn)")
        if config.get("quantization_config"):
            wrong.append("quantized weights (dequantize the checkpoint to bfloat16 first)")
    if wrong:
        raise UnsupportedModel(f"{FAMILIES[family]} with " + "; ".join(wrong) + " is not supported")


def _rope(config: Mapping[str, Any]) -> Rope:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return Rope(theta=float(theta))
    if kind not in ("linear", "llama3", "yarn") or (kind == "yarn" and "kv_lora_rank" not in config):
        raise UnsupportedModel(
            f"rope_type {kind!r} is not supported; known: default, linear, llama3, and yarn with MLA"
        )
    return Rope(
        theta=float(theta),
        kind=kind,
        factor=float(parameters["factor"]),
        original_positions=int(
            parameters.get("original_max_position_embeddings") or config.get("max_position_embeddings", 0)
        ),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 1.0)),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        mscale=float(parameters.get("mscale") or 1.0),
        mscale_all_dim=float(parameters.get("mscale_all_dim") or 0.0),
    )


def _latent(config: Mapping[str, Any]) -> Latent:
    return Latent(
        q_rank=config.get("q_lora_rank"),
        kv_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        v_dim=config["v_head_dim"],
    )


def _mixture(family: str, config: Mapping[str, Any]) -> Mixture | None:
    layers = range(config["num_hidden_layers"])
    if family == "mixtral":
        return Mixture(
            experts=config["num_local_experts"],
            topk=config["num_experts_per_tok"],
            ffn=config["intermediate_size"],
            layers=tuple(layers),
        )
    if family == "qwen3_moe":
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        return Mixture(
            experts=config.get("num_experts") or config["num_local_experts"],
            topk=config["num_experts_per_tok"],
            ffn=config["moe_intermediate_size"],
            layers=tuple(i for i in layers if i not in dense and (i + 1) % step == 0),
            normalise=config.get("norm_topk_prob", False),
        )
    if family == "deepseek_v3":
        return Mixture(
            experts=config.get("n_routed_experts") or config["num_local_experts"],
            topk=config["num_experts_per_tok"],
            ffn=config["moe_intermediate_size"],
            layers=tuple(layers[config.get("first_k_dense_replace", 0) :]),
            shared_ffn=(config.get("n_shared_experts") or 0) * config["moe_intermediate_size"],
            sigmoid=True,
            expert_bias=True,
            scale=config.get("routed_scaling_factor", 1.0),
            groups=config.get("n_group") or 1,
            group_topk=config.get("topk_group") or 1,
        )
    return None
