"""What may end the last pipeline stage in place of the vocabulary's logits: the hidden states, or a critic's value."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class DeferredHead(torch.nn.Module):
    """Keeps the output layer's weight and hands the hidden states on, whole on every tensor-parallel rank.

    The vocabulary projection then happens where the labels are known (`logprob.head_statistics`): only for the tokens
    that need it, a few at a time. Gradients of the hidden states are summed over the tensor-parallel ranks here.
    """

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__()
        self.sequence_parallel = layer.sequence_parallel
        self._layer = (layer,)  # in a tuple: its parameter is registered here, under the name it always had
        self.weight = layer.weight

    def forward(
        self, hidden: Float[Tensor, "s b h"], weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Float[Tensor, "t b h"], None]:
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True), None
        return copy_to_tensor_model_parallel_region(hidden), None

    def sharded_state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """The output layer's own entry in Megatron's distributed checkpoint."""
        return self._layer[0].sharded_state_dict(*arguments, **named)


def head_weight(model: GPTModel) -> Float[Tensor, "v_tp h"]:
    """This rank's rows of the vocabulary projection: the output layer's, or the tied embedding's."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


class ValueHead(torch.nn.Module):
    """Takes the place of GPTModel's output layer on the last pipeline stage; begins at zero.

    The weight [1, h] is the same on every tensor-parallel rank. Under sequence parallelism a rank sees its share of the
    tokens: the weight's gradient is then summed over the tensor-parallel ranks and the values are gathered.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: Float[Tensor, "s b h"], weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Float[Tensor, "t b 1"], None]:
        """Values in float32 for all tokens of this context-parallel rank."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One replicated tensor, for Megatron's distributed checkpoint."""
        state = self.state_dict(prefix="", keep_vars=True)
        copies = (metadata or {}).get("dp_cp_group")
        # without its tensor group Megatron takes the tensor-parallel copies for one and the same, and refuses to save
        tensor = mpu.get_tensor_model_parallel_group() if copies is not None else None
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {}, sharded_offsets, tp_group=tensor, dp_cp_group=copies
        )
