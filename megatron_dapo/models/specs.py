"""Which module stands at each place of a layer: Megatron's Transformer Engine spec, or its local one with host modules.

Megatron's local norm refuses sequence parallelism, its local attention refuses packed sequences and context
parallelism, and its local latent attention loses a gradient; the host modules take exactly those places.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
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
        return _rms_norm(x, self.weight, self.eps)


def _rms_norm(x: Float[Tensor, "... h"], weight: Float[Tensor, "h"], eps: float) -> Float[Tensor, "... h"]:
    """Normalised in float32 and rounded before the weight, as Hugging Face does."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight


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


class NormedColumnLinear(ColumnParallelLinear):
    """A column-parallel linear behind an RMSNorm of its input, with Transformer Engine's parameter names.

    Takes the place of latent attention's KV up projection where queries are not compressed: Megatron 0.19 has one
    switch for the norms of queries and keys and cannot say "keys only".
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_eps = config.layernorm_epsilon

    def forward(self, input_: Float[Tensor, "... i"], *arguments: Any, **named: Any) -> Any:
        return super().forward(_rms_norm(input_, self.layer_norm_weight, self.layer_norm_eps), *arguments, **named)


def decoder_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (and, with `vp_stage`, of this virtual chunk of it)."""
    engine = capabilities().transformer_engine
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=engine,
        normalization=None if engine else config.normalization,
        vp_stage=vp_stage,
    )
    if not engine:
        block.layer_norm = HostNorm
        for layer in block.layer_specs:
            _use_host_modules(layer, config)
    if config.multi_latent_attention and config.q_lora_rank is None:
        normed = _engine_normed_linear() if engine else NormedColumnLinear
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.linear_kv_up_proj = normed
    return block


def mtp_spec(
    config: TransformerConfig, block: TransformerBlockSubmodules, vp_stage: int | None = None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The layers that predict further tokens, each built like the last of `block`; None on stages without them."""
    engine = capabilities().transformer_engine
    spec = get_gpt_mtp_block_spec(config, block, use_transformer_engine=engine, vp_stage=vp_stage)
    if spec is not None and not engine:
        for layer in spec.layer_specs:
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = HostNorm
    return spec


def _engine_normed_linear() -> type:
    """Transformer Engine's own, as a class that Megatron 0.19 does not recognise and hence not refuse."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

    return type("NormedColumnLinear", (TELayerNormColumnParallelLinear,), {})


def _use_host_modules(layer: ModuleSpec, config: TransformerConfig) -> None:
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = HostNorm
    attention = parts.self_attention.submodules
    attention.core_attention = HostAttention
    if config.multi_latent_attention:
        # Megatron recognises a duplicated linear by this very name, which means nothing else on a host.
        multi_latent_attention.TELinear = HostLinear
        attention.linear_q_down_proj = attention.linear_kv_down_proj = HostLinear
        if config.qk_layernorm:
            attention.q_layernorm = attention.kv_layernorm = HostNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = HostNorm
