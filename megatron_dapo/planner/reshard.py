"""`plan reshard`: what one weight push moves between a training layout and a set of engines, counted, not estimated."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_dapo.errors import UserError
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.slices import Layout
from megatron_dapo.models.tables import layout_sizes, megatron_slices
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.planner.networks import network
from megatron_dapo.planner.stages import even_split
from megatron_dapo.resharding.plan import plan
from megatron_dapo.resharding.rollout_layout import rollout_layouts
from megatron_dapo.resharding.stats import PlanStats, plan_stats

_TRAIN = {
    "world": "world",
    "tp": "tensor",
    "pp": "pipeline",
    "vpp": "virtual_pipeline",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "first": "first_stage_layers",
    "last": "last_stage_layers",
}
_ROLLOUT = ("tp", "engines", "ep")


@dataclass(frozen=True)
class ReshardPlan:
    """`layout_seconds` is the time to write both sides' layouts down, `plan_seconds` to match them."""

    model: str
    topology: Topology
    rollout_tensor: int
    engines: int
    stats: PlanStats
    layout_seconds: float
    plan_seconds: float
    bandwidth_gbs: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "train": self.topology.describe(),
            "world": self.topology.world,
            "rollout": f"{self.engines} engines of {self.rollout_tensor}",
            **asdict(self.stats),
            "bytes_per_receiver": self.stats.receive_max_bytes,
            "layout_seconds": round(self.layout_seconds, 4),
            "plan_seconds": round(self.plan_seconds, 4),
            "bandwidth_gbs": self.bandwidth_gbs,
            "push_seconds": self.stats.seconds(self.bandwidth_gbs * 1e9),
        }


def plan_reshard(words: Sequence[str]) -> ReshardPlan:
    """Words: model=…, train.{world,tp,pp,vpp,cp,ep,etp,first,last}=…, rollout.{tp,engines,ep}=…, bandwidth=GB/s,
    item_size=2. Raises UserError for a wrong word or a layout that the model does not have."""
    values = _read(words)
    arch = network(values.get("model", ""))
    topology = _topology(arch, values)
    tensor = _whole(values, "rollout.tp", 1)
    engines = _whole(values, "rollout.engines", max(1, topology.world // tensor))
    bandwidth = float(values.get("bandwidth", 35.0))
    start = time.perf_counter()
    sources = _sources(arch, topology)
    try:
        engine = rollout_layouts(arch, tensor, expert_parallel=values.get("rollout.ep", "0") in ("1", "true"))
    except ValueError as error:
        raise UserError(str(error).replace("rollout.tensor_parallel_size", "rollout.tp")) from error
    destinations = {e * tensor + rank: engine[rank] for e in range(engines) for rank in range(tensor)}
    middle = time.perf_counter()
    made = plan(sources, destinations)
    end = time.perf_counter()
    stats = plan_stats(made, sources, destinations, item_size=_whole(values, "item_size", 2))
    return ReshardPlan(values["model"], topology, tensor, engines, stats, middle - start, end - middle, bandwidth)


def _sources(arch: Architecture, topology: Topology) -> dict[int, Layout]:
    return {rank: megatron_slices(arch, topology, rank) for rank in range(topology.world)}


def _read(words: Sequence[str]) -> dict[str, str]:
    known = ["model", "bandwidth", "item_size", *(f"train.{k}" for k in _TRAIN), *(f"rollout.{k}" for k in _ROLLOUT)]
    values = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            raise UserError(f"plan reshard: `{word}` is not known; words are {', '.join(known)} (key=value)")
        values[key] = value
    return values


def _whole(values: dict[str, str], key: str, otherwise: int) -> int:
    text = values.get(key, str(otherwise))
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"{key}={text}: must be a positive whole number")
    return int(text)


def _topology(arch: Architecture, values: dict[str, str]) -> Topology:
    """The training layout; layers that do not divide over the stages are split with shorter first and last stages."""
    given = {name: _whole(values, f"train.{key}", 1) for key, name in _TRAIN.items() if f"train.{key}" in values}
    smallest = given.get("tensor", 1) * given.get("pipeline", 1) * given.get("context", 1)
    topology = Topology(**{"world": smallest, **given})  # type: ignore[arg-type]
    if topology.first_stage_layers is None and topology.last_stage_layers is None:
        first, last = even_split(arch.layers, topology.pipeline, topology.chunks) or (None, None)
        topology = replace(topology, first_stage_layers=first, last_stage_layers=last)
    illegal = topology.problems(**layout_sizes(arch))
    if illegal:
        raise UserError("this training layout is illegal: " + "; ".join(illegal))
    return topology
