"""Rows of a batch become one packed micro-batch: sequences back to back, no padding to the longest, and back again.

A row is a prompt (left-padded) and a response (right-padded). Packed, position i predicts token i + 1, so the
log-probability of response token j sits at position prompt_length - 1 + j of its sequence.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from tensordict import TensorDict
from torch import Tensor

from megatron_dapo.models.attention import zigzag_index, zigzag_slice


@dataclass(frozen=True)
class PackedMicroBatch:
    """What one forward needs. `t` counts all positions of the micro-batch, `t_cp` those on this rank."""

    tokens: Int[Tensor, "1 t_cp"]
    positions: Int[Tensor, "1 t_cp"]
    labels: Int[Tensor, "1 t_cp"]
    cu_seqlens: Int[Tensor, "n_plus_1"]
    max_seqlen: int
    predicting: Int[Tensor, "k"]  # those of the t_cp positions whose label is a response token
    gather: Int[Tensor, "b r"]  # position among all t of the label of each response token
    valid: Bool[Tensor, "b r"]
    restore: Int[Tensor, "t"] | None  # natural position -> place after the context-parallel all-gather
    real: Bool[Tensor, "t_cp"]  # False on what fills a sequence up to its alignment, and in rows marked `is_padding`
    routing: Int[Tensor, "t_cp layers k"] | None  # experts to replay
    rows: TensorDict

    def to(self, device: torch.device) -> "PackedMicroBatch":
        """The same on another device."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor | TensorDict)
        }
        return replace(self, **moved)


def sequence_multiple(context_parallel: int) -> int:
    """Every sequence is padded to this many tokens: the zigzag split cuts it into 2·cp chunks."""
    return 2 * context_parallel if context_parallel > 1 else 1


def pack_multiple(context_parallel: int, tensor_parallel: int) -> int:
    """Every micro-batch is padded to this many tokens: each rank's share is cut over the tensor-parallel ranks."""
    return lcm(sequence_multiple(context_parallel), tensor_parallel * context_parallel)


def _packed_length(lengths: Int[Tensor, "b"], multiple: int) -> Int[Tensor, "b"]:
    return (lengths + multiple - 1) // multiple * multiple


def pack_rows(
    rows: TensorDict, *, context_parallel: int = 1, context_rank: int = 0, tensor_parallel: int = 1
) -> PackedMicroBatch:
    """Packs `prompts [b, P]` and `responses [b, R]`; the last sequence absorbs the alignment padding.

    `routed_experts [b, s, layers, k]`, where the rows have it, holds the choices for a row's first `routed_length`
    tokens, prompt first. The others (the last token, which a rollout engine never feeds to its model, and padding)
    repeat the last.
    """
    prompts, responses = rows["prompts"], rows["responses"]
    prompt_length, response_length = rows["prompt_length"], rows["response_length"]
    width = max(int(response_length.max()), 1)
    lengths = prompt_length + response_length
    room = _packed_length(lengths, sequence_multiple(context_parallel))
    room[-1] += -int(room.sum()) % pack_multiple(context_parallel, tensor_parallel)
    cu_seqlens = torch.cat([room.new_zeros(1), room.cumsum(0)])
    starts, total = cu_seqlens[:-1], int(cu_seqlens[-1])

    tokens = torch.zeros(total, dtype=torch.long)
    place = torch.arange(prompts.shape[1]) - (prompts.shape[1] - prompt_length)[:, None]
    keep = place >= 0
    tokens[(starts[:, None] + place)[keep]] = prompts[keep]
    response_place = torch.arange(width)[None, :]
    valid = response_place < response_length[:, None]
    response_position = (starts + prompt_length)[:, None] + response_place
    tokens[response_position[valid]] = responses[:, :width][valid]

    positions = torch.arange(total) - starts.repeat_interleave(room)
    real = positions < lengths.repeat_interleave(room)
    if "is_padding" in rows:
        real &= ~rows["is_padding"].repeat_interleave(room)
    routing = None
    if "routed_experts" in rows:
        row = torch.arange(len(room)).repeat_interleave(room)
        routing = rows["routed_experts"][row, positions.minimum(rows["routed_length"].repeat_interleave(room) - 1)]
    labels = torch.cat([tokens[1:], tokens.new_zeros(1)])
    gather = torch.where(valid, response_position - 1, 0)
    needed = torch.zeros(total, dtype=torch.bool)
    needed[gather[valid]] = True
    restore = None
    if context_parallel > 1:
        restore = zigzag_index(cu_seqlens, context_parallel)
        tokens, positions, labels, needed, real = (
            zigzag_slice(x, cu_seqlens, context_parallel, context_rank)
            for x in (tokens, positions, labels, needed, real)
        )
        if routing is not None:
            routing = zigzag_slice(routing, cu_seqlens, context_parallel, context_rank)
    return PackedMicroBatch(
        tokens=tokens[None],
        positions=positions[None],
        labels=labels[None],
        cu_seqlens=cu_seqlens.to(torch.int32),
        max_seqlen=int(room.max()),
        predicting=needed.nonzero().flatten(),
        gather=gather,
        valid=valid,
        restore=restore,
        real=real,
        routing=routing,
        rows=rows,
    )


def row_places(micro_batch: PackedMicroBatch) -> tuple[Int[Tensor, "b s"], Bool[Tensor, "b s"]]:
    """Position among all t of every token of every row (prompt first), and which of the places hold a token."""
    rows = micro_batch.rows
    lengths = rows["prompt_length"] + rows["response_length"]
    place = torch.arange(int(lengths.max()), device=lengths.device)[None]
    valid = place < lengths[:, None]
    return torch.where(valid, micro_batch.cu_seqlens[:-1, None] + place, 0), valid


class _GatherContext(torch.autograd.Function):
    """All-gather over the context-parallel ranks; every rank computes the same loss, so the gradient is a slice."""

    @staticmethod
    def forward(ctx: Any, local: Float[Tensor, "t_cp *rest"], group: dist.ProcessGroup) -> Float[Tensor, "t *rest"]:
        ctx.rank, ctx.size = group.rank(), local.shape[0]
        out = local.new_empty(local.shape[0] * group.size(), *local.shape[1:])
        dist.all_gather_into_tensor(out, local.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(0, ctx.rank * ctx.size, ctx.size), None


def whole_context(
    local: Float[Tensor, "t_cp *rest"], micro_batch: PackedMicroBatch, context_group: dist.ProcessGroup
) -> Float[Tensor, "t *rest"]:
    """All positions in natural order, from the shares of the context-parallel ranks."""
    if micro_batch.restore is None:
        return local
    return _GatherContext.apply(local, context_group)[micro_batch.restore]


def unpack(
    local: Float[Tensor, "t_cp"], micro_batch: PackedMicroBatch, context_group: dist.ProcessGroup
) -> Float[Tensor, "b r"]:
    """Per-position values back to rows: the value of each response token, 0 where there is none."""
    values = whole_context(local, micro_batch, context_group)[micro_batch.gather]
    return torch.where(micro_batch.valid, values, values.new_zeros(()))
