"""Which module stands at each place of a layer: Megatron's Transformer Engine spec, or its local one with host modules.

Megatron's local norm refuses sequence parallelism, its local attention refuses packed sequences and context
parallelism, and its local latent attention loses a gradient; the host modules take exactly those places.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dapo.models.attention import HostAttention
from megatron_dapo.parallel.capabilities import capabilities


class HostNorm(torch.nn.Module):
    """RMSNorm whose weight is marked `sequence_parallel`, so that its gradient is summed over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Float[Tensor, "... h"]) -> Float[Tensor, "... h"]:
        if x.dtype == torch.float32:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight


class HostLinear(MegatronModule):
    """A linear whose weight is whole on every tensor-parallel rank: the down projections of latent attention.

    Megatron's local spec splits them and gathers the output, which loses the tensor-parallel sum of the rope key's
    gradient: the forward is right, the gradients are up to 5 % off (every version to 0.19.2).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Float[Tensor, "... i"]) -> tuple[Float[Tensor, "... o"], None]:
        return F.linear(x, self.weight), None


def decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (and, with `vp_stage`, of this virtual chunk of it)."""
    if capabilities().transformer_engine:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    block.layer_norm = HostNorm
    for layer in block.layer_specs:
        _use_host_modules(layer)
    return block


def _use_host_modules(layer: ModuleSpec) -> None:
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = HostNorm
    attention = parts.self_attention.submodules
    attention.core_attention = HostAttention
    norms = ["q_layernorm"]
    if isinstance(attention, multi_latent_attention.MLASelfAttentionSubmodules):
        norms.append("kv_layernorm")
        # Megatron recognises a duplicated linear by this very name, which means nothing else on a host.
        multi_latent_attention.TELinear = HostLinear
        attention.linear_q_down_proj = attention.linear_kv_down_proj = HostLinear
    else:
        norms.append("k_layernorm")
    for name in norms:
        if getattr(attention, name) not in (None, IdentityOp):
            setattr(attention, name, HostNorm)
