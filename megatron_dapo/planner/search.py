"""All legal layouts of a model on so many devices: those that fit, ranked by estimated step time, with reasons."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_dapo.config import Config, build
from megatron_dapo.errors import UserError
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.tables import layout_sizes
from megatron_dapo.parallel.topology import Topology
from megatron_dapo.planner.memory import engine_memory, role_memory
from megatron_dapo.planner.parameters import rank_parameters
from megatron_dapo.planner.run import GIB, RunPlan, evaluate
from megatron_dapo.planner.stages import even_split
from megatron_dapo.planner.timing import rollout_seconds
from megatron_dapo.planner.words import Request
from megatron_dapo.planner.workload import workload
from megatron_dapo.resharding.rollout_layout import check_divides

WIDEST_CONTEXT = 8


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, why it stands where it stands, and the words that choose it."""

    plan: RunPlan
    reasons: tuple[str, ...]
    words: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        time = self.plan.time
        return {
            "layout": self.plan.request.topology.describe(),
            "words": list(self.words),
            "step_seconds": time.total,
            "stage_seconds": time.stages,
            "tokens_per_gpu_second": time.tokens_per_gpu_second,
            "mfu_update": time.mfu_update,
            "bubble": time.bubble,
            "communication": time.communication,
            "peak_bytes": self.plan.peak,
            "spare_bytes": self.plan.request.device.memory - self.plan.peak,
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True)
class Search:
    """The best candidates, how many layouts were looked at, and why the others are out."""

    best: tuple[Candidate, ...]
    considered: int
    fitting: int
    rejected: dict[str, int]
    nearest_miss: RunPlan | None

    def to_dict(self) -> dict[str, Any]:
        miss = self.nearest_miss
        return {
            "considered": self.considered,
            "fitting": self.fitting,
            "rejected": self.rejected,
            "best": [one.to_dict() for one in self.best],
            "nearest_miss": {"layout": miss.request.topology.describe(), "problems": miss.problems} if miss else None,
        }


def search(request: Request, limit: int = 10) -> Search:
    """Look at every layout of `request`'s world. Tensor ranks stay inside a node, sizes are powers of two (and the
    divisors of the world for the pipeline); micro-batch tokens, batch sizes and the engines' share stay as configured.

    Raises UserError when the world has no legal layout at all, or no engine of any size holds the model.
    """
    configs = [_variant(request.config, recompute, best_engine(request)) for recompute in ("none", "full")]
    rejected: Counter[str] = Counter()
    fitting: list[RunPlan] = []
    miss: RunPlan | None = None
    considered = 0
    for topology in layouts(request.arch, request.topology.world, request.device.per_node):
        considered += 1
        if _state_alone(request, topology) > request.device.memory:
            rejected["parameters, gradients and optimizer alone exceed the memory"] += 1
            continue
        plans = [evaluate(replace(request, config=config, topology=topology)) for config in configs]
        good = [plan for plan in plans if plan.fits]
        if good:
            fitting.append(min(good, key=lambda plan: plan.time.total))
            continue
        rejected[_kind(plans[-1])] += 1
        if miss is None or plans[-1].peak < miss.peak:
            miss = plans[-1]
    if not considered:
        raise UserError(f"{request.topology.world} devices have no legal layout for this model")
    fitting.sort(key=lambda plan: (plan.time.total, plan.peak))
    best = tuple(Candidate(plan, reasons(plan, fitting[0]), words(plan)) for plan in fitting[:limit])
    return Search(best, considered, len(fitting), dict(rejected.most_common()), miss)


def layouts(arch: Architecture, world: int, per_node: int) -> Iterator[Topology]:
    """Every legal topology within the search's bounds."""
    powers = [2**k for k in range(world.bit_length())]
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    mixture = arch.mixture
    sizes = layout_sizes(arch)
    fits = (n for n in powers if n <= per_node and not arch.heads % n)
    for tensor in [n for n in fits if not arch.kv_heads % n or not n % arch.kv_heads]:  # fewer KV heads are replicated
        for pipeline in [n for n in divisors if n <= arch.layers and world % (tensor * n) == 0]:
            for chunks in (1, 2) if pipeline > 1 else (1,):
                ends = even_split(arch.layers, pipeline, chunks)
                if ends is None:
                    continue
                for context in [n for n in powers if n <= WIDEST_CONTEXT and world % (tensor * pipeline * n) == 0]:
                    for expert in powers if mixture else (1,):
                        topology = Topology(
                            world, tensor, pipeline, chunks if chunks > 1 else None, context, expert,
                            first_stage_layers=ends[0], last_stage_layers=ends[1],
                        )  # fmt: skip
                        if world % (topology.etp * expert * pipeline) or sizes["experts"] % expert:
                            continue
                        if sizes["ffn"] % tensor or sizes["shared_ffn"] % tensor or sizes["expert_ffn"] % topology.etp:
                            continue
                        yield topology


def _state_alone(request: Request, topology: Topology) -> float:
    elements = rank_parameters(request.arch, topology, 0)
    return role_memory(elements, topology, request.config.model.dtype).total


def best_engine(request: Request) -> int:
    """The tensor-parallel size of engines that generates fastest; it does not depend on the training layout."""
    load, found = workload(request.config, request.assume), {}
    world = request.topology.world
    node = min(request.device.host_devices, world)
    for tensor in [2**k for k in range(node.bit_length()) if node % 2**k == 0 and world % 2**k == 0]:
        try:
            check_divides(request.arch, tensor, expert_parallel=False)
        except ValueError:
            continue
        config = _variant(request.config, request.config.model.recompute, tensor)
        engine = engine_memory(config, request.arch, request.device, request.assume)
        if engine.longest_sequences < 1:
            continue
        engines = world // tensor
        found[tensor] = rollout_seconds(config, request.arch, request.device, load, engine, engines, request.assume)[0]
    if not found:
        share = request.config.rollout.gpu_memory_utilization
        raise UserError(
            f"no rollout engine on up to {world} {request.device.name} holds this model within "
            f"rollout.gpu_memory_utilization={share}: raise it or use more devices"
        )
    return min(found, key=lambda tensor: found[tensor])


def _variant(config: Config, recompute: str, engine_tensor: int) -> Config:
    values = config.model_dump()
    values["model"] |= {"recompute": recompute, "recompute_modules": ()}
    values["rollout"] |= {"tensor_parallel_size": engine_tensor, "engines": None}
    values["parallel"]["sequence_parallel"] = None
    return build(values)


def _kind(plan: RunPlan) -> str:
    text = plan.problems[0]
    return (
        " ".join(text.split()[:2]) + " does not fit"
        if text.startswith("phase")
        else text.split(":")[0].split(" has ")[0]
    )


def reasons(plan: RunPlan, best: RunPlan) -> tuple[str, ...]:
    """What speaks for and against a layout, and where it loses time against the best."""
    request, time = plan.request, plan.time
    fullest = max(plan.stages, key=lambda stage: stage.peak)
    phase = max(fullest.phases, key=lambda name: fullest.phases[name])
    spare = (request.device.memory - plan.peak) / GIB
    found = [f"{spare:.1f} GiB to spare (fullest: stage {fullest.pp}, {phase})"]
    if time.bubble:
        found.append(f"pipeline bubble {time.bubble:.0%} with {time.micro_batches} micro-batches")
    traffic = time.traffic
    for link in (traffic.tensor, traffic.all_to_all, traffic.context):
        if link.ranks > 1 and link.bytes:
            where = "between nodes" if link.crosses_nodes else "inside the node"
            found.append(f"{link.kind.replace('_', '-')} over {link.ranks} ranks {where}")
    if request.config.model.recompute == "full":
        found.append("recomputes every layer (does not fit, or is slower, without)")
    if plan is not best:
        lost = {name: value - best.time.stages.get(name, 0.0) for name, value in time.stages.items()}
        worst = max(lost, key=lambda name: lost[name])
        found.append(f"{time.total / best.time.total:.2f} x the best's time, most of it lost in {worst}")
    return tuple(found)


def words(plan: RunPlan) -> tuple[str, ...]:
    """The overrides that make a configuration this layout."""
    topology, config = plan.request.topology, plan.request.config
    sizes = {
        "world_size": topology.world,
        "tensor": topology.tensor,
        "pipeline": topology.pipeline,
        "virtual_pipeline": topology.virtual_pipeline,
        "context": topology.context,
        "expert": topology.expert,
        "first_stage_layers": topology.first_stage_layers,
        "last_stage_layers": topology.last_stage_layers,
    }
    chosen = [f"parallel.{name}={size}" for name, size in sizes.items() if size not in (None, 1)]
    engine = config.rollout.tensor_parallel_size
    return (*chosen, f"model.recompute={config.model.recompute}", f"rollout.tensor_parallel_size={engine}")
