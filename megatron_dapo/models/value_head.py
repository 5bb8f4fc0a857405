"""The critic's head: one number per token in place of the vocabulary's logits."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


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
        group = (metadata or {}).get("dp_cp_group")
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets, dp_cp_group=group)
