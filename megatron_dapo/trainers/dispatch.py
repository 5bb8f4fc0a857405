"""From a batch on the driver to shares for every rank and back: who gets which rows, in which micro-batches.

All ranks of one data-parallel coordinate get the same rows; the answers are collected from the rank of each coordinate
that holds the last pipeline stage. Planned on the driver in one place, without communication.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_dapo.data.packing import LINEAR_COST, plan_micro_batches
from megatron_dapo.engine.packed import pack_multiple, sequence_multiple
from megatron_dapo.engine.routing import RowRouting, stack_layers
from megatron_dapo.parallel.topology import Topology

Plan = list[list[list[int]]]  # [data_parallel][micro_batch][row]

SEQUENCE_FIELDS = ("prompts", "prompt_length", "responses", "response_length")


@dataclass(frozen=True)
class Dispatcher:
    """`max_tokens` bounds the tokens of one packed micro-batch, alignment included, before context ranks cut it.

    With `balance` data-parallel ranks get rows of equal cost, without it equally many in the order of the batch. A row
    of L tokens costs `linear_cost`·L + L².
    """

    topology: Topology
    max_tokens: int
    balance: bool = True
    linear_cost: float = LINEAR_COST

    def plan(self, lengths: Int[Tensor, "b"]) -> Plan:
        """Every data-parallel rank gets balanced work in equally many micro-batches, each within the bound."""
        context, tensor = self.topology.context, self.topology.tensor
        multiple, whole = sequence_multiple(context), pack_multiple(context, tensor)
        padded = (lengths + multiple - 1) // multiple * multiple
        in_order = [part.tolist() for part in torch.arange(len(padded)).tensor_split(self.topology.data)]
        return plan_micro_batches(
            padded.tolist(),
            self.topology.data,
            self.max_tokens // whole * whole,  # what packing adds at the end then stays within the bound
            assigned=None if self.balance else in_order,
            # the interleaved schedule runs its micro-batches in rounds of one per stage
            multiple_of=self.topology.pipeline if self.topology.virtual_pipeline else 1,
            a=self.linear_cost,
        )

    def shares(
        self, batch: TensorDict, plan: Plan, fields: Sequence[str], replay: str | None = None
    ) -> list[list[TensorDict]]:
        """One list of micro-batches per rank, with only the fields that the stage reads.

        `replay` names the field with the routing, one tensor [n, layers, k] per row, that the routers are to follow.
        """
        wanted = batch.select(*SEQUENCE_FIELDS, *fields, *([] if replay is None else [replay]))
        by_dp = [[_rows(wanted, rows, replay) for rows in micro_batches] for micro_batches in plan]
        return [by_dp[self.topology.coordinate(rank).dp] for rank in range(self.topology.world)]

    def collect(self, results: Sequence[Any], plan: Plan, rows: int, width: int) -> dict[str, Tensor]:
        """Per-token outputs of all micro-batches as `[b, t]` tensors in the order of the batch."""
        out: dict[str, Tensor] = {}
        for dp, rank in enumerate(self.output_ranks()):
            for micro_batch, outputs in zip(plan[dp], results[rank], strict=True):
                if micro_batch:
                    _scatter_rows(out, outputs, micro_batch, rows, width)
        return out

    def collect_routing(
        self, results: Sequence[Sequence[RowRouting]], plan: Plan, lengths: Int[Tensor, "b"]
    ) -> list[Int[Tensor, "n layers k"]]:
        """Every row's routing, from the pipeline stages that each hold some of the layers."""
        rows: list[dict[int, Tensor]] = [{} for _ in lengths]
        for place in self.topology.coordinates():
            if place.tp == place.cp == 0:
                for micro_batch, found in zip(plan[place.dp], results[place.rank], strict=True):
                    for row, experts in zip(micro_batch, found.experts, strict=bool(micro_batch)):
                        of_row = experts[: int(lengths[row])].unbind(1)
                        rows[row].update(zip(found.layers, of_row, strict=True))
        return [stack_layers(row) for row in rows]

    def output_ranks(self) -> list[int]:
        """For each data-parallel coordinate, the rank that holds its outputs."""
        last = self.topology.pipeline - 1
        holders = [c for c in self.topology.coordinates() if (c.tp, c.cp, c.pp) == (0, 0, last)]
        return [c.rank for c in sorted(holders, key=lambda c: c.dp)]


def _rows(batch: TensorDict, rows: Sequence[int], replay: str | None) -> TensorDict:
    """The rows cut to their own longest prompt and response; no rows make a padding micro-batch."""
    if not rows:
        return _padding(batch, replay)
    picked = batch[torch.tensor(rows)]
    prompt, response = int(picked["prompt_length"].max()), max(int(picked["response_length"].max()), 1)
    width = batch["responses"].shape[1]
    cut = {
        name: value[:, value.shape[1] - prompt :]
        if name == "prompts"
        else (value[:, :response] if value.dim() == 2 and value.shape[1] == width else value)
        for name, value in picked.items()
        if isinstance(value, Tensor)
    }
    return TensorDict(cut | ({} if replay is None else _routing(list(picked[replay]))), batch_size=[len(rows)])


def _routing(of_rows: Sequence[Int[Tensor, "n layers k"]]) -> dict[str, Tensor]:
    """Ragged to padded: what `engine.packed.pack_rows` reads."""
    length = torch.tensor([len(row) for row in of_rows])
    return {"routed_experts": pad_sequence(list(of_rows), batch_first=True), "routed_length": length}


def _padding(batch: TensorDict, replay: str | None) -> TensorDict:
    """One sequence of a prompt token and a response token that neither losses nor routers count: collectives stay in
    step with the other ranks'.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    one = {name: value[:1] if value.dim() == 1 else value[:1, :1] for name, value in tensors.items()}
    padding = TensorDict({name: torch.zeros_like(value) for name, value in one.items()}, batch_size=[1])
    padding["prompt_length"] = torch.ones(1, dtype=torch.long)
    padding["response_length"] = torch.ones(1, dtype=torch.long)
    padding["is_padding"] = torch.ones(1, dtype=torch.bool)
    return padding if replay is None else padding.update(_routing([batch[replay][0][:1]]))


def _scatter_rows(
    out: dict[str, Tensor], outputs: Mapping[str, Tensor], rows: Sequence[int], count: int, width: int
) -> None:
    for name, values in outputs.items():
        whole = out.setdefault(name, torch.zeros(count, width, dtype=values.dtype))
        whole[torch.tensor(rows), : values.shape[1]] = values
