"""What is trained and how it is cut over the ranks: the sections `model` and `parallel`."""

from dataclasses import replace
from math import lcm
from typing import Any, Literal

from megatron_dapo.config.base import Count, NonNegative, Section, Strings
from megatron_dapo.parallel.topology import Topology

Dtype = Literal["float32", "bfloat16"]


class MoEConfig(Section):
    """Router losses of the training engine. In reinforcement learning they are off unless asked for."""

    load_balancing: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """Which auxiliary load-balancing loss is added."""
    aux_loss_coeff: NonNegative = 0.0
    """Its weight."""
    z_loss_coeff: NonNegative = 0.0
    """Weight of the router's z-loss."""
    expert_bias_update_rate: NonNegative = 0.0
    """Step of the aux-loss-free expert bias (DeepSeek-V3); 0 keeps the bias as loaded."""


class ModelConfig(Section):
    """The policy's architecture, precision and memory savers."""

    path: str = ""
    """Hugging Face directory (config.json, safetensors, tokenizer)."""
    dtype: Dtype = "bfloat16"
    """Precision of forward and backward; main weights and optimizer state are always float32."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activation recomputation: nothing, whole layers, or the modules of `recompute_modules`."""
    recompute_modules: Strings = ()
    """Megatron's module names for `recompute=selective` (empty: Megatron's default, core_attn)."""
    megatron: dict[str, Any] = {}
    """Passed through to Megatron's TransformerConfig; a name that it does not have is refused."""
    megatron_optimizer: dict[str, Any] = {}
    """The same to its OptimizerConfig, for actor, critic and sft; what their `optim` says is refused here."""
    megatron_ddp: dict[str, Any] = {}
    """The same to its DistributedDataParallelConfig, e.g. `overlap_grad_reduce=true`."""
    moe: MoEConfig = MoEConfig()
    router_replay: Literal["none", "R2", "R3"] = "none"
    """R2: the update replays the routing of the old-log-prob pass. R3: both replay the rollout engine's routing."""


class ParallelConfig(Section):
    """How many ways each dimension is cut. Data parallelism is what remains of the world."""

    world_size: Count | None = None
    """Training ranks in all; null: as many as the launcher started (`megatron-dapo train` then starts one)."""
    tensor: Count = 1
    """Tensor parallel ranks per layer."""
    pipeline: Count = 1
    """Pipeline stages."""
    virtual_pipeline: Count | None = None
    """Model chunks per pipeline stage (interleaved schedule); null: plain 1F1B."""
    context: Count = 1
    """Ranks over which one packed sequence is cut."""
    expert: Count = 1
    """Ranks over which the experts of a layer are spread."""
    expert_tensor: Count | None = None
    """Tensor parallel ranks inside an expert; null: `tensor` without expert parallelism, else 1."""
    sequence_parallel: bool | None = None
    """Cut norm and dropout activations along the sequence; null: whenever `tensor` > 1."""
    first_stage_layers: Count | None = None
    """Layers of the first pipeline stage, when uneven."""
    last_stage_layers: Count | None = None
    """Layers of the last pipeline stage, when uneven."""
    pipeline_layout: str | None = None
    """Megatron's explicit layout string, e.g. `Et*3|t*4|t*3L`; instead of first/last_stage_layers."""


def topology_of(parallel: ParallelConfig, world: int | None = None) -> Topology:
    """The layout that the config asks for, over `world` ranks; None: `world_size`, or else as few as have it."""
    topology = Topology(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
        pipeline_layout=parallel.pipeline_layout,
    )
    smallest = topology.pipeline * lcm(topology.tensor * topology.context, topology.etp * topology.expert)
    return replace(topology, world=world or parallel.world_size or smallest)
