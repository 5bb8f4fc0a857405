"""The plan of one run: memory of every stage and phase, engines, traffic, time, and what stands against it."""

from dataclasses import asdict, dataclass
from typing import Any

from megatron_dapo.errors import UserError
from megatron_dapo.models.tables import layout_sizes
from megatron_dapo.planner.memory import EngineMemory, StageMemory, engine_memory, stage_memory
from megatron_dapo.planner.parameters import matrix_parameters, total_parameters
from megatron_dapo.planner.timing import StepTime, step_time
from megatron_dapo.planner.words import Request
from megatron_dapo.planner.workload import Workload, workload
from megatron_dapo.resharding.rollout_layout import check_divides

GIB = 2**30


@dataclass(frozen=True)
class RunPlan:
    """`problems` are what will not work; an empty list means that the plan fits."""

    request: Request
    load: Workload
    stages: tuple[StageMemory, ...]
    engine: EngineMemory
    time: StepTime
    problems: tuple[str, ...]

    @property
    def peak(self) -> float:
        """Bytes on the fullest device in its fullest phase."""
        return max(stage.peak for stage in self.stages)

    @property
    def fits(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values, sizes in bytes, times in seconds."""
        request, time = self.request, self.time
        return {
            "plan": request.recipe,
            "fits": self.fits,
            "problems": list(self.problems),
            "model": {"parameters": total_parameters(request.arch), "active": matrix_parameters(request.arch)},
            "device": asdict(request.device),
            "layout": {"world": request.topology.world, "text": request.topology.describe()},
            "peak_bytes": self.peak,
            "stages": [_stage(stage) for stage in self.stages],
            "engine": asdict(self.engine),
            "workload": asdict(self.load),
            "time": {**{k: v for k, v in asdict(time).items() if k != "traffic"}, "total": time.total},
            "traffic": {name: asdict(getattr(time.traffic, name)) for name in time.traffic.__dataclass_fields__},
            "assumptions": asdict(request.assume),
        }


def _stage(stage: StageMemory) -> dict[str, Any]:
    return {**asdict(stage), "parameters": stage.elements.total, "peak": stage.peak}


def plan_run(request: Request) -> RunPlan:
    """Plan a run. Raises UserError when the layout does not exist for the model; what does not fit is in `problems`."""
    config, arch, topology = request.config, request.arch, request.topology
    illegal = topology.problems(**layout_sizes(arch))
    if illegal:
        raise UserError("this layout is illegal: " + "; ".join(illegal))
    try:
        check_divides(arch, config.rollout.tensor_parallel_size, expert_parallel=False)
    except ValueError as error:
        raise UserError(str(error)) from error
    return evaluate(request)


def evaluate(request: Request) -> RunPlan:
    """Plan a layout that is known to be legal."""
    config, arch, topology, assume = request.config, request.arch, request.topology, request.assume
    load = workload(config, assume)
    engine = engine_memory(config, arch, request.device, assume)
    fused = request.device.name != "cpu"
    stages = tuple(
        stage_memory(config, arch, topology, pp, load, engine, assume, fused) for pp in range(topology.pipeline)
    )
    time = step_time(config, arch, topology, request.device, load, engine, stages, assume)
    return RunPlan(request, load, stages, engine, time, tuple(problems(request, load, engine, stages)))


def problems(request: Request, load: Workload, engine: EngineMemory, stages: tuple[StageMemory, ...]) -> list[str]:
    """What will not work, one sentence each, with the way out."""
    found, device, config = [], request.device, request.config
    for phase in stages[0].phases:
        worst = max(stages, key=lambda stage: stage.phases[phase])
        need = worst.phases[phase]
        if need > device.memory:
            found.append(
                f"phase {phase} needs {need / GIB:.1f} GiB on stage {worst.pp}, {device.name} has "
                f"{device.memory_gib:.1f}: {_remedy(request, phase)}"
            )
    tensor = config.rollout.tensor_parallel_size
    if engine.longest_sequences < 1:
        longest = config.derived.max_model_len
        found.append(
            f"an engine of tensor_parallel_size {tensor} has room for {engine.kv_tokens} tokens, not "
            f"for one sequence of {longest}: raise rollout.tensor_parallel_size or rollout.gpu_memory_utilization"
        )
    world = request.topology.world
    node = min(device.host_devices, world)
    if node % tensor and device.name != "cpu":
        found.append(
            f"rollout.tensor_parallel_size {tensor} does not divide the {node} devices of a node, and an engine does "
            "not span nodes: lower it, or choose devices with more memory"
        )
    wanted = config.rollout.engines or 0
    if wanted > world // tensor and device.name != "cpu":
        found.append(f"rollout.engines {wanted} of {tensor} devices each do not fit {world} devices: set null")
    short = config.actor.ppo_mini_batch_size * config.rollout.n
    if short < request.topology.data:
        found.append(
            f"an optimizer step has {short} sequences for {request.topology.data} data-parallel ranks: some have none, "
            "raise actor.ppo_mini_batch_size or the other dimensions"
        )
    return found


def _remedy(request: Request, phase: str) -> str:
    config = request.config
    if phase == "rollout":
        return "lower rollout.gpu_memory_utilization or offload what actor.offload can"
    steps = []
    if config.model.recompute != "full":
        steps.append("set model.recompute=full")
    steps.append("lower actor.max_tokens_per_micro_batch" if phase != "push" else "raise rollout.tensor_parallel_size")
    steps.append("use more tensor, pipeline or expert parallel ranks (--search finds layouts that fit)")
    return ", or ".join(steps)
