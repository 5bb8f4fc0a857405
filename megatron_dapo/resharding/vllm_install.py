"""Put one received storage into a live vLLM model, with what the platform does to weights after loading them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from megatron_dapo.resharding.vllm_layout import FULL


@torch.no_grad()
def install(model: nn.Module, param: str, received: Tensor) -> None:
    """Replace the weights of one storage. `received` may be overwritten by the next push, so nothing may keep it."""
    if param.startswith(FULL):
        loader: Any = model  # every vLLM model has load_weights; torch's Module does not say so
        loader.load_weights([(param.removeprefix(FULL), received.clone())])
        return
    path, _, leaf = param.rpartition(".")
    module = model.get_submodule(path)
    if not current_platform.is_cpu():  # untested on GPU
        copy_front(module.get_parameter(leaf).data, received)
    elif isinstance(module, RoutedExperts):
        install_cpu_experts(module, leaf, received)
    elif isinstance(module, LinearBase) and leaf == "weight":
        install_cpu_linear(module, received)
    else:
        copy_front(module.get_parameter(leaf).data, received)
        if isinstance(module, VocabParallelEmbedding):
            repack_heads(model, module)


def copy_front(live: Tensor, received: Tensor) -> None:
    """Copy into the front of a storage; what is behind it is padding."""
    live[tuple(slice(n) for n in received.shape)].copy_(received)


def install_cpu_linear(module: LinearBase, received: Tensor) -> None:
    """CPU linears keep their weights packed for oneDNN and leave `weight` empty: pack the new ones the same way."""
    live = module.get_parameter("weight")
    if live.numel():  # this layer is not packed
        live.data.copy_(received)
        return
    module.weight = Parameter(received.clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(module, remove_weight=True)


def install_cpu_experts(module: RoutedExperts, leaf: str, received: Tensor) -> None:
    """Expert weights live in the kernel's own block order, which vLLM applies only when it loads for the first time."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    live = module.get_parameter(leaf).data
    experts = module.quant_method.moe_kernel.fused_experts
    if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
        copy_front(live, received)
        return
    if received.shape != live.shape:
        padded = torch.zeros_like(live)
        copy_front(padded, received)
        received = padded
    live.copy_(cpu_prepack_moe_weight(received, experts.isa))


def repack_heads(model: nn.Module, embedding: VocabParallelEmbedding) -> None:
    """Every head that computes with this storage, tied or not, has its own packed copy of it."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and module.weight is embedding.weight:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
