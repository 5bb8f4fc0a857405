"""Where the tokens of a mixture of experts went, in rollout and in training: counted on the ranks, told by the driver.

Ranks count what their engine sampled and what their routers chose, so that routing itself (a byte per token, layer and
choice) travels no further than it must; the driver adds the counts up.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from megatron_dapo.metrics import (
    Last,
    Metrics,
    MoELoadAccumulator,
    MoELog,
    Placement,
    megatron_placement,
    placement_metrics,
    source_distance,
)
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.rollout.requests import Generation
from megatron_dapo.runtime.group import WorkerGroup

ROLLOUT, TRAINING = "rollout", "training"


@dataclass(frozen=True)
class Counts:
    """One rank's share since it was last asked, `[layers, experts]`; None where it had nothing to count.

    All zeros: there were tokens, but nothing told where they went. `invalid`: ids of the rollout that are no expert's.
    """

    rollout: Int[Tensor, "layers experts"] | None
    training: Int[Tensor, "layers experts"] | None
    invalid: int = 0


class RankLoad:
    """A rank's side: counts its engine's samples and its routers' choices until the driver takes them.

    The driver has one too, for the engines that no rank hosts. Samples may be counted from several threads at once.
    """

    def __init__(self, arch: Architecture, *, keep_routing: bool) -> None:
        assert arch.mixture is not None, "a dense model routes nothing"
        self.moe_layers, self.all_layers = arch.mixture.layers, arch.layers
        self.keep_routing = keep_routing
        self._rollout = MoELoadAccumulator(len(self.moe_layers), arch.mixture.experts)
        self._training: Tensor | None = None
        self._sampled = False
        self._lock = threading.Lock()

    def sampled(self, generations: Sequence[Generation]) -> list[Generation]:
        """Counts the response tokens of what was sampled; hands routing on only where it is needed."""
        kept = self.count([(one.routed_experts, len(one.token_ids)) for one in generations])
        return [replace(one, routed_experts=routed) for one, routed in zip(generations, kept, strict=True)]

    def count(self, samples: Sequence[tuple[np.ndarray | None, int]]) -> list[np.ndarray | None]:
        """Counts the response tokens of samples, routing and response length each; what of it is to be handed on."""
        routed = [None if ids is None else self._of_moe_layers(ids) for ids, _ in samples]
        lengths = [length for _, length in samples]
        with self._lock:
            # a single token is never fed, so it has no routing
            self._sampled = self._sampled or any(length > 1 for length in lengths)
            found = zip(routed, lengths, strict=True)
            self._rollout.update_trajectories((ids, length) for ids, length in found if ids is not None)
        return routed if self.keep_routing else [None] * len(samples)

    def trained(self, counts: Int[Tensor, "layers experts"]) -> None:
        """Adds what this rank's routers chose in one pass."""
        self._training = counts if self._training is None else self._training + counts

    def take(self) -> Counts:
        """What was counted since the last time."""
        with self._lock:
            rollout = self._rollout.counts.clone() if self._sampled else None
            taken = Counts(rollout, self._training, self._rollout.invalid)
            self._rollout.reset()
            self._training, self._sampled = None, False
        return taken

    def _of_moe_layers(self, routed: np.ndarray) -> np.ndarray:
        """On GPU vLLM tells a row of choices for dense layers too. # untested on GPU"""
        whole = routed.shape[1] == self.all_layers != len(self.moe_layers)
        return routed[:, list(self.moe_layers)] if whole else routed


class ExpertLoad:
    """The driver's side: balance of both sources every step, and a report in `moe.jsonl` every so many steps."""

    def __init__(
        self, arch: Architecture, topology: Topology, directory: Path, every: int, ranks_per_node: int | None = None
    ) -> None:
        """`own`: what counts the samples of engines that no rank hosts, to be set where there are some."""
        assert arch.mixture is not None, "a dense model routes nothing"
        self.own: RankLoad | None = None
        self._expected: set[str] = set()  # sources that had tokens in this step
        shape = len(arch.mixture.layers), arch.mixture.experts
        self.placement = training_placement(arch, topology, ranks_per_node or topology.world)
        self.every = every
        self._sources = {source: MoELoadAccumulator(*shape, prefix=f"{source}/moe") for source in (ROLLOUT, TRAINING)}
        self._since_report = {source: MoELoadAccumulator(*shape) for source in (ROLLOUT, TRAINING)}
        self._log = MoELog(directory)

    def collect(self, group: WorkerGroup) -> None:
        """Adds what all ranks counted since the last time."""
        for counts in [*group.call("take_expert_load"), *([self.own.take()] if self.own is not None else [])]:
            for source, of_rank, invalid in ((ROLLOUT, counts.rollout, counts.invalid), (TRAINING, counts.training, 0)):
                if of_rank is not None:
                    self._expected.add(source)
                    self._sources[source].add_counts(of_rank, invalid)
                    self._since_report[source].add_counts(of_rank)

    def drop(self, group: WorkerGroup) -> None:
        """Forgets what was counted so far: it belongs to no step."""
        self.collect(group)
        for counter in (*self._sources.values(), *self._since_report.values()):
            counter.clear()
        self._expected.clear()

    def step(self, group: WorkerGroup, step: int, *, last: bool) -> Metrics:
        """The metrics of the step that ends, and its report where one is due."""
        self.collect(group)
        values: dict[str, float] = {}
        if all(counter.counts.any() for counter in self._sources.values()):
            values |= source_distance(self._sources[ROLLOUT], self._sources[TRAINING])
        for source in sorted(self._expected):
            counter = self._sources[source]
            values |= placement_metrics(counter.counts.numpy(), self.placement, counter.prefix)
            counter.add_to_metrics(values)
        self._expected.clear()
        if step == 1 or step % self.every == 0 or last:
            self._write(step)
        return {name: Last(value) for name, value in values.items()}

    def _write(self, step: int) -> None:
        for source, counted in self._since_report.items():
            if counted.counts.any():
                self._log.write(step, source, counted, self.placement)
                counted.reset()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, after `collect`: a step is saved before it is reported."""
        return {name: counter.state_dict() for name, counter in self._sources.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The saved step counts as reported, so that the next one's drift is measured from it."""
        for name, counter in self._sources.items():
            counter.load_state_dict(state[name])
            counter.reset()

    def close(self) -> None:
        self._log.close()


def training_placement(arch: Architecture, topology: Topology, ranks_per_node: int) -> Placement:
    """Where the trainer keeps the experts of each mixture layer; the driver's own devices say nothing of the ranks'."""
    assert arch.mixture is not None
    number = {layer: index for index, layer in enumerate(arch.mixture.layers)}
    stages: list[list[int]] = [[] for _ in range(topology.pipeline)]
    for stage in topology.stages(arch.layers):
        stages[stage.pp] += [number[layer] for layer in stage.layers if layer in number]
    return megatron_placement(
        len(number),
        arch.mixture.experts,
        world=topology.world,
        expert=topology.expert,
        expert_tensor=topology.etp,
        stage_layers=stages,
        gpus_per_node=ranks_per_node,
    )
