"""Which experts every token goes to: recorded in a forward pass, brought back to rows, replayed in another.

Each of Megatron's routers holds a `RouterReplay`. `Routers` tells those of a model chunk what to do around every
forward of a micro-batch, so that it stays right whatever order a pipeline schedule runs them in: the recomputation of
a replayed forward takes its choices in the order of the forwards, that of a recorded one is not recorded again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Int
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_dapo.engine.packed import PackedMicroBatch, row_places, whole_context
from megatron_dapo.models.architecture import Architecture

LocalChoice = dict[int, Tensor]  # MoE layer of the whole model -> [t_local, k] experts of the tokens this rank routed


@dataclass(frozen=True)
class RowRouting:
    """Experts of every token of the rows of one micro-batch, for the MoE layers of one pipeline stage."""

    layers: tuple[int, ...]
    experts: Int[Tensor, "b s l k"]  # position 0 is the first token of the prompt; beyond a row's end: zeros


class Routers:
    """The routers of one engine, by model chunk. Layers are numbered as MoE layers of the whole model, from 0."""

    def __init__(self, chunks: Sequence[GPTModel], arch: Architecture):
        self.moe_layers = [layer for layer in range(arch.layers) if arch.is_moe_layer(layer)]
        self._chunks = [
            [_router(module) for module in chunk.modules() if isinstance(module, TopKRouter)] for chunk in chunks
        ]
        self._sequence_parallel = bool(chunks) and chunks[0].config.sequence_parallel

    @contextmanager
    def forward(self, chunk: int, batch: PackedMicroBatch, record: LocalChoice | None) -> Iterator[None]:
        """Around one forward of one chunk: replay `batch.routing` if there is one; note the choices in `record`."""
        for layer, replay in self._chunks[chunk]:
            if batch.routing is not None:
                replay.set_target_indices(self._own(batch.routing, layer))
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            elif record is not None:
                replay.set_router_replay_action(RouterReplayAction.RECORD)
        yield
        for layer, replay in self._chunks[chunk]:
            if record is not None:
                chosen = replay.get_recorded_indices() if batch.routing is None else replay.target_topk_idx
                assert chosen is not None, "the router did not run, or is fused and cannot be recorded"
                record[self.moe_layers.index(layer)] = chosen.to(torch.int16)  # kept for all micro-batches
            if batch.routing is not None:  # until the next forward: what a recomputation does
                replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            else:
                replay.clear_router_replay_action()

    def clear(self) -> None:
        """After a schedule: no choices are kept and nothing is replayed."""
        for routers in self._chunks:
            for _, replay in routers:
                replay.clear_indices()
                replay.clear_router_replay_action()

    def _own(self, routing: Int[Tensor, "t_cp layers k"], layer: int) -> Int[Tensor, "t_local k"]:
        """One layer's choices for the tokens that this rank routes."""
        of_all_layers = routing.shape[1] != len(self.moe_layers)  # vLLM's own recording counts dense layers too
        ids = routing[:, layer if of_all_layers else self.moe_layers.index(layer)].long()
        if not self._sequence_parallel:
            return ids
        return ids.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]


def _router(module: TopKRouter) -> tuple[int, RouterReplay]:
    assert module.router_replay is not None and module.layer_number is not None
    return module.layer_number - 1, module.router_replay


def expert_counts(
    recorded: Sequence[LocalChoice], micro_batches: Sequence[PackedMicroBatch], layers: int, experts: int
) -> Int[Tensor, "layers experts"]:
    """How often this rank's tokens chose each expert, alignment padding left out. The sum over all ranks is the total.

    A router runs once per token in the forward; what a recomputation chooses again is not recorded.
    """
    counts = torch.zeros(layers, experts, dtype=torch.int64)
    for choice, batch in zip(recorded, micro_batches, strict=True):
        for layer, ids in choice.items():
            real = _own_tokens(batch.real, ids.shape[0])
            counts[layer] += torch.bincount(ids[real].flatten().long().cpu(), minlength=experts)
    return counts


def _own_tokens(of_context: Tensor, count: int) -> Tensor:
    """This rank's share of the positions of a context-parallel rank, if they are cut further (sequence parallelism)."""
    if count == of_context.shape[0]:
        return of_context
    return of_context.narrow(0, mpu.get_tensor_model_parallel_rank() * count, count)


def to_rows(choice: LocalChoice, batch: PackedMicroBatch, dtype: torch.dtype) -> RowRouting:
    """All tokens' choices, row by row; collective over the tensor- and context-parallel ranks of a stage."""
    layers, (place, valid) = tuple(sorted(choice)), row_places(batch)
    if not layers:  # a stage of dense layers
        return RowRouting((), torch.zeros(*place.shape, 0, 0, dtype=dtype))
    local = torch.stack([choice[layer] for layer in layers], 1).int()  # gloo cannot send 16 bits
    tensor = mpu.get_tensor_model_parallel_group()
    if local.shape[0] != batch.tokens.shape[1]:
        parts = local.new_empty(local.shape[0] * tensor.size(), *local.shape[1:])
        torch.distributed.all_gather_into_tensor(parts, local.contiguous(), group=tensor)
        local = parts
    whole = whole_context(local, batch, mpu.get_context_parallel_group())
    return RowRouting(layers, torch.where(valid[..., None, None], whole[place], 0).to(dtype).cpu())


def stack_layers(by_layer: Mapping[int, Int[Tensor, "n k"]]) -> Int[Tensor, "n layers k"]:
    """The MoE layers that the pipeline stages hold, in order."""
    return torch.stack([by_layer[layer] for layer in sorted(by_layer)], 1)
