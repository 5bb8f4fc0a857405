"""Build this rank's model chunks: GPTModel with the right spec, heads and marks; the weights come from `load.py`."""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.heads import DeferredHead, ValueHead
from megatron_dapo.models.rope import inverse_frequencies
from megatron_dapo.models.specs import decoder_spec, mtp_spec
from megatron_dapo.models.tables import padded_vocab
from megatron_dapo.parallel.capabilities import capabilities


def build_model(
    arch: Architecture, config: TransformerConfig, value_head: bool = False, deferred_head: bool = False
) -> list[GPTModel]:
    """This rank's model chunks (one, or one per virtual pipeline stage), without weights.

    Needs Megatron's process groups (`parallel.groups.init_distributed`). The last stage gives logits [b, t, v/tp]; with
    `deferred_head` the hidden states [b, t, h] (for `logprob.head_statistics`), with `value_head` values [b, t, 1].
    """
    size = config.virtual_pipeline_model_parallel_size
    stages = range(size) if size else [None]
    return [_chunk(arch, config, stage, value_head, deferred_head) for stage in stages]


def _chunk(
    arch: Architecture, config: TransformerConfig, vp_stage: int | None, value_head: bool, deferred_head: bool
) -> GPTModel:
    whole = vp_stage is None
    last = mpu.is_pipeline_last_stage(ignore_virtual=whole, vp_stage=vp_stage)
    block = decoder_spec(config, vp_stage)
    model = GPTModel(
        config,
        block,
        vocab_size=padded_vocab(arch.vocab, config.tensor_model_parallel_size),
        max_sequence_length=arch.max_positions,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=whole, vp_stage=vp_stage),
        post_process=last,
        share_embeddings_and_output_weights=arch.tied and not value_head,
        position_embedding_type="rope",
        rotary_base=int(arch.rope.theta),
        vp_stage=vp_stage,
        mtp_block_spec=mtp_spec(config, block, vp_stage) if arch.mtp_layers else None,
    )
    if value_head and last:
        model.output_layer = ValueHead(config)
    elif deferred_head and last:
        model.output_layer = DeferredHead(model.output_layer)
    if arch.latent is None:
        model.rotary_pos_emb.inv_freq = inverse_frequencies(arch.rope, arch.head_dim).to(
            model.rotary_pos_emb.inv_freq.device
        )
    mark_experts(model)
    count_real_tokens(model)
    balance_nothing()
    return model.to(capabilities().device)  # modules that are not Megatron's own begin on the host


def mark_experts(model: GPTModel) -> None:
    """Tell Megatron's reductions and optimizer which weights belong to experts, under every layout.

    Before 0.19 Megatron-core marks them only when expert parallelism is on. Without the mark their gradients are
    reduced over the wrong group when expert_tensor differs from tensor, silently, and the optimizer's number of parts,
    hence its checkpoint, depends on the layout.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


def balance_nothing() -> None:
    """Let the load-balancing loss of a micro-batch of padding be 0.

    Megatron-core 0.16 divides by its number of real tokens, so that it would be NaN, and with it every gradient.
    """
    megatron_router.switch_load_balancing_loss_func = _load_balancing_loss


def _load_balancing_loss(*, total_num_tokens: int | Tensor, **named: Any) -> Tensor:
    tokens = total_num_tokens.clamp(min=1) if isinstance(total_num_tokens, Tensor) else total_num_tokens
    return switch_load_balancing_loss_func(total_num_tokens=tokens, **named)


def count_real_tokens(model: GPTModel) -> None:
    """Let the expert bias learn from real tokens only.

    Megatron-core (every version to 0.19.2) combines a [tokens, experts] map with a [tokens] mask there and fails.
    """
    for module in model.modules():
        if isinstance(module, TopKRouter) and module.enable_expert_bias:
            module._apply_expert_bias = partial(_count_tokens, module)


def _count_tokens(router: TopKRouter, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    if torch.is_grad_enabled():  # neither in evaluation nor in the first of two passes under recomputation
        real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
        router.local_tokens_per_expert += real.sum(0)
