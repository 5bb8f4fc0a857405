"""Megatron's TransformerConfig from three sources: the network, the project's config, and what the machine can do."""

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_dapo.config.model import ModelConfig, ParallelConfig, topology_of
from megatron_dapo.errors import UserError
from megatron_dapo.models.architecture import Architecture, Latent, Mixture
from megatron_dapo.models.tables import check_layout
from megatron_dapo.parallel.capabilities import capabilities
from megatron_dapo.parallel.topology import LayoutError, Topology

Settings = dict[str, Any]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class OptionError(UserError, ValueError):
    """A `model.megatron*.*` that Megatron does not have, or that something else decides."""


def transformer_config(arch: Architecture, model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """Megatron's configuration of this network under this layout.

    `model.megatron` is passed through last. Raises OptionError for a name that Megatron does not have (naming the
    nearest) and for one that the checkpoint or the layout decides, LayoutError for a layout that does not fit.
    """
    topology = topology_of(parallel)
    check_layout(arch, topology)
    decided = _architecture(arch) | _parallel(arch, topology, parallel)
    if arch.mixture:
        decided |= _experts(arch, arch.mixture)
    kind = MLATransformerConfig if arch.latent else TransformerConfig
    settings = decided | _numerics(model) | _router(arch, model) | _recompute(model)
    by = "the checkpoint's config.json and by parallel.*, which would then disagree with the weights"
    return kind(**(settings | pass_through("model.megatron", model.megatron, decided, kind, by)))


def _architecture(arch: Architecture) -> Settings:
    settings: Settings = {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn,
        "layernorm_epsilon": arch.norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm or (arch.latent is not None and arch.latent.q_rank is not None),
        "mtp_num_layers": arch.mtp_layers or None,
    }
    return settings | (_latent(arch, arch.latent) if arch.latent else {})


def _latent(arch: Architecture, latent: Latent) -> Settings:
    rope = arch.rope
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim,
        "rope_type": "yarn" if rope.kind == "yarn" else "rope",
        "rotary_base": rope.theta,
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_positions or arch.max_positions,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }


def _experts(arch: Architecture, mixture: Mixture) -> Settings:
    limited = mixture.groups > 1
    return {
        "num_moe_experts": mixture.experts,
        "moe_router_topk": mixture.topk,
        "moe_ffn_hidden_size": mixture.ffn,
        "moe_layer_freq": [int(arch.is_moe_layer(layer)) for layer in range(arch.layers)],
        "moe_shared_expert_intermediate_size": mixture.shared_ffn or None,
        "moe_router_score_function": "sigmoid" if mixture.sigmoid else "softmax",
        # Softmax over the chosen k equals softmax over all, renormalised; without renormalising it comes first.
        "moe_router_pre_softmax": not mixture.normalise,
        "moe_router_topk_scaling_factor": mixture.scale if mixture.scale != 1.0 else None,
        "moe_router_num_groups": mixture.groups if limited else None,
        "moe_router_group_topk": mixture.group_topk if limited else None,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": capabilities().transformer_engine,
        "moe_enable_routing_replay": True,  # every router can be recorded and replayed (engine/routing.py) ...
        "moe_router_fusion": False,  # ... which the fused router cannot
    }


def _parallel(arch: Architecture, topology: Topology, parallel: ParallelConfig) -> Settings:
    interleaved = topology.virtual_pipeline is not None
    sequence = topology.tensor > 1 if parallel.sequence_parallel is None else parallel.sequence_parallel
    if arch.mixture and topology.tensor > 1 and not sequence:
        raise LayoutError(
            "parallel.sequence_parallel=false: experts with tensor > 1 train only with sequence parallelism"
        )
    return {
        "tensor_model_parallel_size": topology.tensor,
        "pipeline_model_parallel_size": topology.pipeline,
        "virtual_pipeline_model_parallel_size": topology.virtual_pipeline,
        "context_parallel_size": topology.context,
        "expert_model_parallel_size": topology.expert,
        "expert_tensor_parallel_size": topology.etp,
        "sequence_parallel": sequence and topology.tensor > 1,
        "pipeline_model_parallel_layout": _stage_lists(arch, topology),
        # The default dispatcher "allgather" refuses variable lengths, for dense models too (every version to 0.19.2).
        "moe_token_dispatcher_type": "alltoall",
        "variable_seq_lengths": True,  # packed micro-batches differ in length
        # Batched p2p puts both directions between the two ranks of pipeline=2 into one batch: silently wrong
        # activations with the interleaved schedule (every version to 0.19.2).
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": capabilities().deallocate_pipeline_outputs,
        # True would divide auxiliary losses by tensor x context (0.16.1); losses here are normalised globally anyway.
        "calculate_per_token_loss": False,
    }


def _stage_lists(arch: Architecture, topology: Topology) -> list[list[str]] | None:
    """Uneven stages as Megatron's explicit layout: the slice table and Megatron then read the same split."""
    uneven = (topology.first_stage_layers, topology.last_stage_layers, topology.pipeline_layout)
    if topology.pipeline == 1 or all(item is None for item in uneven):
        return None
    return [
        ["embedding"] * stage.embedding + ["decoder"] * len(stage.layers) + ["loss"] * stage.head
        for stage in topology.stages(arch.layers)
    ]


def _numerics(model: ModelConfig) -> Settings:
    dtype, fusions = DTYPES[model.dtype], capabilities().fusions
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        # Every weight is loaded, so initialising does nothing; but it must take place, on the device: Megatron marks
        # parameters as tensor-parallel only then, and without the mark their gradients are missing from the norm.
        "init_method": _leave_as_is,
        "output_layer_init_method": _leave_as_is,
        "embedding_init_method": _leave_as_is,
        "transformer_impl": "transformer_engine" if capabilities().transformer_engine else "local",
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": fusions,
        "bias_activation_fusion": fusions,
        "masked_softmax_fusion": fusions,
        "persist_layer_norm": fusions,
        "apply_rope_fusion": False,
        "deterministic_mode": capabilities().cuda and torch.are_deterministic_algorithms_enabled(),
    }


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _router(arch: Architecture, model: ModelConfig) -> Settings:
    """Balancing losses. Off unless asked for: in RL they move the policy for a reason that is not the reward."""
    if arch.mixture is None:
        return {}
    moe = model.moe
    return {
        "moe_router_load_balancing_type": moe.load_balancing,
        "moe_aux_loss_coeff": moe.aux_loss_coeff if moe.load_balancing != "none" else 0.0,
        "moe_z_loss_coeff": moe.z_loss_coeff or None,
        "moe_router_enable_expert_bias": arch.mixture.expert_bias,
        "moe_router_bias_update_rate": moe.expert_bias_update_rate,
    }


def _recompute(model: ModelConfig) -> Settings:
    if model.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if model.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(model.recompute_modules) or None}
    return {}


def pass_through(key: str, chosen: Settings, decided: Iterable[str], kind: type[Any], by: str) -> Settings:
    """The user's own fields of one of Megatron's dataclasses, below `key`.

    Raises OptionError for one that it does not have and for one that was `decided`, naming `by` what.
    """
    known = {field.name for field in fields(kind)}
    for name in chosen:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise OptionError(f"{key}.{name}: Megatron's {kind.__name__} has no such field; nearest is {near[0]}")
        if name in decided:
            raise OptionError(f"{key}.{name}={chosen[name]!r}: decided by {by}; remove it")
    return chosen
