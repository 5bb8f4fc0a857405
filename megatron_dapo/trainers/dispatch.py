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

from megatron_dapo.data.packing import plan_micro_batches
from megatron_dapo.parallel.topology import Topology

Plan = list[list[list[int]]]  # [data_parallel][micro_batch][row]

SEQUENCE_FIELDS = ("prompts", "prompt_length", "responses", "response_length")


@dataclass(frozen=True)
class Dispatcher:
    """`max_tokens` bounds the tokens of one micro-batch on one rank; context parallelism shares a sequence."""

    topology: Topology
    max_tokens: int

    def plan(self, lengths: Int[Tensor, "b"]) -> Plan:
        """Every data-parallel rank gets balanced work in equally many micro-batches, each within the bound."""
        context = self.topology.context
        multiple = 2 * context if context > 1 else 1
        padded = (lengths + multiple - 1) // multiple * multiple
        return plan_micro_batches(padded.tolist(), self.topology.data, self.max_tokens * context)

    def shares(self, batch: TensorDict, plan: Plan, fields: Sequence[str]) -> list[list[TensorDict]]:
        """One list of micro-batches per rank, with only the fields that the stage reads."""
        wanted = batch.select(*SEQUENCE_FIELDS, *fields)
        by_dp = [[_rows(wanted, rows) for rows in micro_batches] for micro_batches in plan]
        return [by_dp[self.topology.coordinate(rank).dp] for rank in range(self.topology.world)]

    def collect(self, results: Sequence[Any], plan: Plan, rows: int, width: int) -> dict[str, Tensor]:
        """Per-token outputs of all micro-batches as `[b, t]` tensors in the order of the batch."""
        out: dict[str, Tensor] = {}
        for dp, rank in enumerate(self.output_ranks()):
            for micro_batch, outputs in zip(plan[dp], results[rank], strict=True):
                if micro_batch:
                    _scatter_rows(out, outputs, micro_batch, rows, width)
        return out

    def output_ranks(self) -> list[int]:
        """For each data-parallel coordinate, the rank that holds its outputs."""
        last = self.topology.pipeline - 1
        holders = [c for c in self.topology.coordinates() if (c.tp, c.cp, c.pp) == (0, 0, last)]
        return [c.rank for c in sorted(holders, key=lambda c: c.dp)]


def _rows(batch: TensorDict, rows: Sequence[int]) -> TensorDict:
    """The rows cut to their own longest prompt and response; no rows make a padding micro-batch."""
    if not rows:
        return _padding(batch)
    picked = batch[torch.tensor(rows)]
    prompt, response = int(picked["prompt_length"].max()), max(int(picked["response_length"].max()), 1)
    width = batch["responses"].shape[1]
    return TensorDict(
        {
            name: value[:, value.shape[1] - prompt :]
            if name == "prompts"
            else (value[:, :response] if value.dim() == 2 and value.shape[1] == width else value)
            for name, value in picked.items()
        },
        batch_size=[len(rows)],
    )


def _padding(batch: TensorDict) -> TensorDict:
    """One sequence of a prompt token and a response token that no loss counts: it keeps collectives in step."""
    one = {name: value[:1] if value.dim() == 1 else value[:1, :1] for name, value in batch.items()}
    padding = TensorDict({name: torch.zeros_like(value) for name, value in one.items()}, batch_size=[1])
    padding["prompt_length"] = torch.ones(1, dtype=torch.long)
    padding["response_length"] = torch.ones(1, dtype=torch.long)
    return padding


def _scatter_rows(
    out: dict[str, Tensor], outputs: Mapping[str, Tensor], rows: Sequence[int], count: int, width: int
) -> None:
    for name, values in outputs.items():
        whole = out.setdefault(name, torch.zeros(count, width, dtype=values.dtype))
        whole[torch.tensor(rows), : values.shape[1]] = values
