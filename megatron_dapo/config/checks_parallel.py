"""Does the layout fit the world, and the model the layout? Plain arithmetic, known before any process starts."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from megatron_dapo.config.model import topology_of
from megatron_dapo.config.problems import ConfigError, Problem
from megatron_dapo.config.schema import Config, problem


def parallel_problems(config: Config) -> Iterator[Problem]:
    """Contradictions inside `parallel`; those with the world only where `parallel.world_size` is given."""
    parallel = config.parallel
    if parallel.sequence_parallel and parallel.tensor == 1:
        text = "Cuts over the tensor-parallel ranks, of which there is one: set null."
        yield problem(config, "parallel.sequence_parallel", text, "parallel.tensor")
    stage_keys = {
        "virtual_pipeline": parallel.virtual_pipeline,
        "first_stage_layers": parallel.first_stage_layers,
        "last_stage_layers": parallel.last_stage_layers,
        "pipeline_layout": parallel.pipeline_layout,
    }
    for name, value in stage_keys.items():
        if value is not None and parallel.pipeline == 1:
            yield problem(config, f"parallel.{name}", "Needs parallel.pipeline > 1: set null.", "parallel.pipeline")
        elif value is not None and parallel.pipeline_layout is not None and name.endswith("layers"):
            text = "parallel.pipeline_layout says it already: set one of the two to null."
            yield problem(config, f"parallel.{name}", text, "parallel.pipeline_layout")
    if parallel.world_size is not None:
        yield from _world(config, parallel.world_size)


def check_world(config: Config, world_size: int) -> None:
    """For a launcher that knows how many ranks there are. Raises ConfigError if the layout does not fit them."""
    given, problems = config.parallel.world_size, list(_world(config, world_size))
    if given is not None and given != world_size:
        text = f"The launcher started {world_size} ranks: start {given}, or set null."
        problems.insert(0, problem(config, "parallel.world_size", text))
    if problems:
        raise ConfigError(problems)


def _world(config: Config, world: int) -> Iterator[Problem]:
    parallel, expert_tensor = config.parallel, config.derived.expert_tensor
    products = [
        ("tensor x pipeline x context", (parallel.tensor, parallel.pipeline, parallel.context)),
        ("expert_tensor x expert x pipeline", (expert_tensor, parallel.expert, parallel.pipeline)),
    ]
    names = ("tensor", "pipeline", "context", "expert", "expert_tensor")
    for words, (a, b, c) in products:
        step = a * b * c
        if world % step:
            below = world // step * step
            near = " or ".join(str(n) for n in (below, below + step) if n)
            text = (
                f"Must be a multiple of {words} = {a} x {b} x {c} = {step}. Nearest: {near}; or lower one of the three."
            )
            yield Problem("parallel.world_size", world, text, tuple(f"parallel.{name}" for name in names))


@dataclass(frozen=True)
class ModelNumbers:
    """What of an architecture decides whether a layout fits it; plain integers, 0 where the model has none."""

    layers: int
    heads: int
    kv_heads: int
    ffn: int = 0
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    topk: int = 0
    max_positions: int = 0  # 0: unknown


def check_model(config: Config, numbers: ModelNumbers, world: int | None = None) -> None:
    """Raise ConfigError with everything that keeps this model from running under this configuration."""
    if problems := model_problems(config, numbers, world):
        raise ConfigError(problems)


def model_problems(config: Config, numbers: ModelNumbers, world: int | None = None) -> list[Problem]:
    """Everything that keeps a model of these numbers from being laid out over `world` ranks, replayed or sampled."""
    return [*_layout(config, numbers, world), *_experts(config, numbers), *_positions(config, numbers)]


def _layout(config: Config, numbers: ModelNumbers, world: int | None) -> Iterator[Problem]:
    """What the engine's own layout says: `Topology` alone knows what fits."""
    topology = topology_of(config.parallel, world)
    sizes = {name: value for name, value in asdict(numbers).items() if name not in ("topk", "max_positions")}
    faults = topology.faults(**sizes)
    for fault in faults:
        key = "world_size" if fault.size == "world" else fault.size
        value = topology.world if fault.size == "world" else config.parallel.model_dump()[fault.size]
        yield Problem(f"parallel.{key}", value, fault.text[0].upper() + fault.text[1:] + ".")
    if faults:
        near = topology.neighbours(**sizes)
        yield Problem("parallel", f"{topology.describe()}, of {topology.world} ranks", near[0].upper() + near[1:] + ".")


def _experts(config: Config, numbers: ModelNumbers) -> Iterator[Problem]:
    parallel, model = config.parallel, config.model
    if numbers.experts:
        if parallel.tensor > 1 and not config.derived.sequence_parallel:
            text = "Under tensor parallelism experts are trained with it only: set null or true."
            yield problem(config, "parallel.sequence_parallel", text)
        return
    if model.router_replay != "none":
        yield problem(config, "model.router_replay", "The model has no router: set none.")
    if model.moe.load_balancing != "none":
        yield problem(config, "model.moe.load_balancing", "The model has no router: set none.")


def _positions(config: Config, numbers: ModelNumbers) -> Iterator[Problem]:
    longest = config.derived.max_model_len
    if numbers.max_positions and longest > numbers.max_positions:
        text = (
            f"With data.max_prompt_length = {config.data.max_prompt_length} a sequence may reach {longest} tokens, but "
            f"the model was made for {numbers.max_positions}: lower one of the two."
        )
        yield problem(config, "data.max_response_length", text)
