"""Put received storages into a live vLLM model, with what its platform does to weights after loading them.

`received` may be overwritten by the next push, so nothing here may keep it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from megatron_dapo.resharding.vllm_layout import FULL

PLAIN_GPU_BACKENDS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)


def check_installable(model: nn.Module) -> None:
    """Raise for a model whose kernels keep weights in an order that this file cannot make."""
    for path, module in model.named_modules():
        if isinstance(module, LinearBase | RoutedExperts) and type(module.quant_method).__name__ not in (
            "UnquantizedLinearMethod",
            "UnquantizedFusedMoEMethod",
        ):
            kind = type(module.quant_method).__name__
            raise NotImplementedError(f"weights of {path} are kept by {kind}; pushes need an unquantized rollout model")
        if isinstance(module, RoutedExperts) and not current_platform.is_cpu():  # untested on GPU
            backend = module.quant_method.unquantized_backend
            if backend not in PLAIN_GPU_BACKENDS:
                way_out = "set rollout.engine_kwargs.moe_backend=triton"
                raise NotImplementedError(f"{path} keeps its experts in the order of {backend.name}; {way_out}")


@torch.no_grad()
def install(model: nn.Module, param: str, received: Tensor) -> None:
    """Replace the weights of one storage."""
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
        # packed for oneDNN: the weight itself is gone, and comes back for as long as the packing takes
        module.weight = Parameter(received.clone(), requires_grad=False)
        module.quant_method.process_weights_after_loading(module)
    else:
        copy_front(module.get_parameter(leaf).data, received)
        if isinstance(module, VocabParallelEmbedding):
            repack_heads(model, module)


@torch.no_grad()
def finish(model: nn.Module, dtype: torch.dtype) -> None:
    """What depends on several storages: latent attention multiplies with matrices derived from `kv_b_proj`."""
    for module in model.modules():
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading(dtype)


def copy_front(live: Tensor, received: Tensor) -> None:
    """Copy into the front of a storage; what is behind it is padding."""
    live[tuple(slice(n) for n in received.shape)].copy_(received)


def install_cpu_experts(module: RoutedExperts, leaf: str, received: Tensor) -> None:
    """Expert weights live in the kernel's own block order, which vLLM applies only when it loads for the first time."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    live = module.get_parameter(leaf).data
    method = module.quant_method
    assert isinstance(method, UnquantizedFusedMoEMethod)
    experts = method.moe_kernel.fused_experts
    padded = received
    if received.shape != live.shape:  # the kernel wants the intermediate dimension in multiples of 32
        padded = torch.zeros_like(live)
        if leaf == "w13_weight":
            gate, up = received.chunk(2, dim=1)
            copy_front(padded, gate)
            copy_front(padded[:, padded.shape[1] // 2 :], up)
        else:
            copy_front(padded, received)
    if isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch:
        padded = cpu_prepack_moe_weight(padded, experts.isa)
    live.copy_(padded)


def repack_heads(model: nn.Module, embedding: VocabParallelEmbedding) -> None:
    """A head has a packed copy of its weights besides the weights, also where these are the embedding's (tied)."""
    sharing = [m for m in model.modules() if isinstance(m, ParallelLMHead) and m.weight is embedding.weight]
    for module in sharing or [embedding]:
        module.quant_method.process_weights_after_loading(module)
