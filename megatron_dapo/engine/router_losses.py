"""Router losses (load balancing, z-loss), where they are on: only real tokens count, and their values are reported.

Megatron adds them inside the routers' forward; here are the mask that tells it about padding and the values it noted.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Bool
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dapo.engine.packed import PackedMicroBatch
from megatron_dapo.metrics import Last, Mean, Metrics
from megatron_dapo.parallel.capabilities import capabilities

_NOTED_AS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def router_losses(config: TransformerConfig) -> list[str]:
    """Megatron's names of the losses that are on."""
    if config.num_moe_experts is None:
        return []
    balancing = _NOTED_AS.get(str(config.moe_router_load_balancing_type))
    on = [balancing] if balancing is not None and config.moe_aux_loss_coeff else []
    return on + (["z_loss"] if config.moe_z_loss_coeff else [])


def padding_mask(batch: PackedMicroBatch, config: TransformerConfig, embeds: bool) -> Bool[Tensor, "1 t"] | None:
    """True on alignment padding; None where no router reads it.

    `embeds`: the chunk begins with the embedding. Only such a chunk cuts the mask over the tensor-parallel ranks by
    itself under sequence parallelism (every version to 0.19.2).
    """
    if config.num_moe_experts is None or not (router_losses(config) or config.moe_router_bias_update_rate):
        return None
    mask = ~batch.real[None]
    if config.sequence_parallel and not embeds:
        mask = mask.chunk(mpu.get_tensor_model_parallel_world_size(), 1)[mpu.get_tensor_model_parallel_rank()]
    return mask.contiguous()


def expert_bias(chunks: Sequence[torch.nn.Module], config: TransformerConfig, prefix: str) -> Metrics:
    """`{prefix}/expert_bias/max_abs` over all layers where the bias is being learned. Collective."""
    if not (config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate):
        return {}
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    biases = [router.expert_bias for router in routers if router.expert_bias is not None]
    largest = torch.stack([torch.zeros((), device=capabilities().device), *(bias.abs().max() for bias in biases)]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mpu.get_pipeline_model_parallel_group())
    return {f"{prefix}/expert_bias/max_abs": Last(float(largest))}


def take_router_losses(config: TransformerConfig, micro_batches: int, prefix: str) -> Metrics:
    """`{prefix}/<loss>_aux`: mean over MoE layers and micro-batches since the last call. Collective.

    The z-loss is this rank's: Megatron averages it over a rank's own tokens.
    """
    noted = get_moe_layer_wise_logging_tracker()
    found: Metrics = {}
    for name in router_losses(config):
        entry = noted.get(name)  # a stage of dense layers has noted nothing
        device = capabilities().device
        layers = torch.zeros(config.num_layers, device=device) if entry is None else entry["values"].clone()
        dist.all_reduce(layers, group=mpu.get_pipeline_model_parallel_group())
        if name != "z_loss":
            dist.all_reduce(layers, group=mpu.get_tensor_and_context_parallel_group())
        moe_layers = sum(config.moe_layer_freq) if isinstance(config.moe_layer_freq, list) else config.num_layers
        found[f"{prefix}/{name}_aux"] = Mean(float(layers.sum()) / (moe_layers * micro_batches), 1.0)
        if entry is not None:
            entry["values"].zero_()
    return found
