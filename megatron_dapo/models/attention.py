"""Core attention where Transformer Engine is not: packed sequences, grouped queries, context parallelism, over SDPA.

A pack of many short sequences is padded into a few rectangles of similar lengths and each rectangle is one SDPA call.
That is exact: with a causal mask no token sees the padding to its right, and the padding's outputs are dropped.
Under context parallelism keys and values are gathered; each rank holds its two zigzag chunks of every sequence.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

_WASTE = 1.3  # a rectangle may hold this many times the tokens of its sequences (plus a little for very short ones)


def zigzag_index(cu_seqlens: Int[Tensor, "n_plus_1"], ranks: int) -> Int[Tensor, "t"]:
    """Where token p of the whole pack lies after the ranks' zigzag shares were concatenated.

    Rank r holds, of every sequence, chunks r and 2·ranks-1-r of its 2·ranks equal chunks (the layout of Megatron and
    Transformer Engine, which balances causal attention). Sequence lengths must be multiples of 2·ranks.
    """
    bounds = tuple(cu_seqlens.tolist())
    return torch.argsort(torch.cat([_zigzag_places(bounds, ranks, r) for r in range(ranks)])).to(cu_seqlens.device)


def zigzag_slice(x: Tensor, cu_seqlens: Int[Tensor, "n_plus_1"], ranks: int, rank: int, dim: int = 0) -> Tensor:
    """This rank's share of a packed tensor along `dim`; `zigzag_index` undoes it after a gather."""
    if ranks == 1:
        return x
    return x.index_select(dim, _zigzag_places(tuple(cu_seqlens.tolist()), ranks, rank).to(x.device))


@lru_cache(maxsize=256)
def _zigzag_places(bounds: tuple[int, ...], ranks: int, rank: int) -> Int[Tensor, "t_cp"]:
    """Positions in the pack that one context-parallel rank holds, in its order."""
    pieces = []
    for start, end in pairwise(bounds):
        chunk, rest = divmod(end - start, 2 * ranks)
        if rest:
            raise ValueError(
                f"a packed sequence has {end - start} tokens; context parallel {ranks} needs a multiple of {2 * ranks}"
            )
        for j in (rank, 2 * ranks - 1 - rank):
            pieces.append(torch.arange(start + j * chunk, start + (j + 1) * chunk))
    return torch.cat(pieces)


@dataclass(frozen=True)
class _Rectangle:
    """Some sequences of a pack side by side. Slots beyond a sequence's end repeat its last token."""

    queries: Int[Tensor, "n q"]  # rows of this rank's packed queries
    keys: Int[Tensor, "n k"]  # rows of the whole pack's keys
    mask: Bool[Tensor, "n 1 q k"] | None  # None: plain causal (q == k)
    real: Int[Tensor, "m"]  # flat slots of [n, q] that hold a token

    def to(self, device: torch.device) -> "_Rectangle":
        mask = None if self.mask is None else self.mask.to(device)
        return _Rectangle(self.queries.to(device), self.keys.to(device), mask, self.real.to(device))


@dataclass(frozen=True)
class _Plan:
    rectangles: tuple[_Rectangle, ...]
    restore: Int[Tensor, "t_cp"]  # packed order among the rectangles' real slots


@lru_cache(maxsize=128)
def _plan(bounds: tuple[int, ...], ranks: int, rank: int, causal: bool, device: torch.device) -> _Plan:
    """Group the sequences of a pack into rectangles. The same pack meets every layer, so plans are kept."""
    lengths = [end - start for start, end in pairwise(bounds)]
    order = sorted((i for i in range(len(lengths)) if lengths[i]), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[groups[-1][0]] <= _WASTE * lengths[i] + 8:
            groups[-1].append(i)
        else:
            groups.append([i])
    rectangles = [_rectangle(bounds, group, ranks, rank, causal) for group in groups]
    taken = torch.cat([r.queries.flatten()[r.real] for r in rectangles])
    return _Plan(tuple(r.to(device) for r in rectangles), torch.argsort(taken).to(device))


def _rectangle(bounds: tuple[int, ...], group: list[int], ranks: int, rank: int, causal: bool) -> _Rectangle:
    starts = torch.tensor([bounds[i] for i in group])[:, None]
    lengths = torch.tensor([bounds[i + 1] - bounds[i] for i in group])[:, None]
    longest = int(lengths.max())
    key_slot = torch.arange(longest)[None]
    keys = starts + torch.minimum(key_slot, lengths - 1)
    if ranks == 1:
        real = (key_slot < lengths).flatten().nonzero().flatten()
        whole = bool((lengths == longest).all())
        mask = None if causal or whole else (key_slot < lengths)[:, None, None, :]
        return _Rectangle(keys, keys, mask, real)
    chunk = lengths // (2 * ranks)
    slot = torch.arange(longest // ranks)[None]
    local = torch.minimum(slot, lengths // ranks - 1)
    position = torch.where(local < chunk, rank * chunk + local, (2 * ranks - 2 - rank) * chunk + local)
    queries = starts // ranks + local
    mask = key_slot[:, None, :] <= position[:, :, None]
    return _Rectangle(queries, keys, mask[:, None], (slot < lengths // ranks).flatten().nonzero().flatten())


class HostAttention(MegatronModule):
    """Megatron's core attention module over `scaled_dot_product_attention`.

    Takes [s, b, h, d] or, packed, [t, h, d] with `cu_seqlens`; fewer KV heads than query heads, and value heads of
    another size (latent attention). Returns [s, b, h·d_v] or [t, h·d_v].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp_group = pg_collection.cp if pg_collection is not None else mpu.get_context_parallel_group()

    def forward(
        self,
        query: Float[Tensor, "..."],
        key: Float[Tensor, "..."],
        value: Float[Tensor, "..."],
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        causal = (attn_mask_type or self.mask_type) in (AttnMaskType.causal, AttnMaskType.padding_causal)
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        if packed_seq_params is not None:
            padded = packed_seq_params.cu_seqlens_q_padded
            bounds = packed_seq_params.cu_seqlens_q if padded is None else padded
            return self._packed(query, key, value, tuple(bounds.tolist()), ranks, rank, causal)
        length, batch = query.shape[:2]
        if ranks == 1:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._sdpa(q, k, v, None, causal).permute(2, 0, 1, 3).reshape(length, batch, -1)
        rows = [
            self._packed(query[:, i], key[:, i], value[:, i], (0, length * ranks), ranks, rank, causal)
            for i in range(batch)
        ]
        return torch.stack(rows, dim=1)

    def _packed(
        self,
        query: Float[Tensor, "t_cp h d"],
        key: Float[Tensor, "t_cp g d"],
        value: Float[Tensor, "t_cp g dv"],
        bounds: tuple[int, ...],
        ranks: int,
        rank: int,
        causal: bool,
    ) -> Float[Tensor, "t_cp h*dv"]:
        if ranks > 1:
            if not causal:
                raise ValueError("context parallelism is implemented for causal attention only")
            both = torch.cat([key, value], -1)  # one collective for the two; its gradient is a reduce-scatter
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
            both = both.index_select(0, zigzag_index(torch.tensor(bounds), ranks).to(both.device))
            key, value = both.split([key.shape[-1], value.shape[-1]], -1)
        plan = _plan(bounds, ranks, rank, causal, query.device)
        outputs = []
        for r in plan.rectangles:
            n, width = r.queries.shape
            q = query.index_select(0, r.queries.flatten()).view(n, width, *query.shape[1:]).transpose(1, 2)
            k, v = (
                x.index_select(0, r.keys.flatten()).view(n, r.keys.shape[1], *x.shape[1:]).transpose(1, 2)
                for x in (key, value)
            )
            o = self._sdpa(q, k, v, r.mask, causal and r.mask is None)
            o = o.transpose(1, 2).reshape(n * width, -1)
            outputs.append(o if r.real.numel() == n * width else o.index_select(0, r.real))
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return together.index_select(0, plan.restore)

    def _sdpa(
        self, q: Float[Tensor, "n h q d"], k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> Float[Tensor, "n h q dv"]:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=self.softmax_scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.shape[1] != k.shape[1],
        )
