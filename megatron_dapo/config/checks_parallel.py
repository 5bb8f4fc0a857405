"""Does the layout fit the world, and the model the layout? Plain arithmetic, so that it is known before a process starts."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dapo.config.problems import ConfigError, Problem
from megatron_dapo.config.schema import Config


def parallel_problems(config: Config) -> Iterator[Problem]:
    """Contradictions inside `parallel`; those with the world only where `parallel.world_size` is given."""
    parallel = config.parallel
    if parallel.sequence_parallel and parallel.tensor == 1:
        yield Problem(
            "parallel.sequence_parallel",
            True,
            "Cuts over the tensor-parallel ranks, of which there is one: set null.",
            ("parallel.tensor",),
        )
    if parallel.virtual_pipeline is not None and parallel.pipeline == 1:
        yield Problem(
            "parallel.virtual_pipeline",
            parallel.virtual_pipeline,
            "Needs parallel.pipeline > 1: set null.",
            ("parallel.pipeline",),
        )
    for key, value in (
        ("first_stage_layers", parallel.first_stage_layers),
        ("last_stage_layers", parallel.last_stage_layers),
    ):
        if value is not None and parallel.pipeline == 1:
            yield Problem(f"parallel.{key}", value, "Needs parallel.pipeline > 1: set null.", ("parallel.pipeline",))
        if value is not None and parallel.pipeline_layout is not None:
            yield Problem(
                f"parallel.{key}",
                value,
                "parallel.pipeline_layout says it already: set one of the two to null.",
                ("parallel.pipeline_layout",),
            )
    if parallel.world_size is not None:
        yield from _world(config, parallel.world_size)


def check_world(config: Config, world_size: int) -> None:
    """For a launcher that knows how many ranks there are. Raises ConfigError if the layout does not fit them."""
    given = config.parallel.world_size
    problems = list(_world(config, world_size))
    if given is not None and given != world_size:
        problems.insert(
            0,
            Problem(
                "parallel.world_size", given, f"The launcher started {world_size} ranks: start {given}, or set null."
            ),
        )
    if problems:
        raise ConfigError(problems)


def _world(config: Config, world: int) -> Iterator[Problem]:
    parallel, etp = config.parallel, config.derived.expert_tensor
    dense = parallel.tensor * parallel.pipeline * parallel.context
    expert = etp * parallel.expert * parallel.pipeline
    others = ("parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.expert", "parallel.expert_tensor")
    if world % dense:
        yield Problem(
            "parallel.world_size",
            world,
            f"Must be a multiple of tensor x pipeline x context = {parallel.tensor} x {parallel.pipeline} x {parallel.context} = "
            f"{dense}. Nearest: {_nearest_multiples(dense, world)}; or lower one of the three.",
            others,
        )
    if world % expert:
        yield Problem(
            "parallel.world_size",
            world,
            f"Must be a multiple of expert_tensor x expert x pipeline = {etp} x {parallel.expert} x {parallel.pipeline} = {expert}. "
            f"Nearest: {_nearest_multiples(expert, world)}; or lower one of the three.",
            others,
        )


def _nearest_multiples(step: int, value: int) -> str:
    below = value // step * step
    return " or ".join(str(n) for n in (below, below + step) if n > 0)


@dataclass(frozen=True)
class ModelNumbers:
    """What of an architecture decides whether a layout fits it; all plain integers, 0 where the model has none."""

    layers: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    max_positions: int = 0  # 0: unknown


def check_model(config: Config, numbers: ModelNumbers) -> None:
    """Raise ConfigError with everything that keeps this model from running under this configuration."""
    if problems := model_problems(config, numbers):
        raise ConfigError(problems)


def model_problems(config: Config, numbers: ModelNumbers) -> list[Problem]:
    """Everything that keeps a model of these numbers from being laid out, replayed or sampled as configured."""
    return [
        *_divisions(config, numbers),
        *_stages(config, numbers),
        *_experts(config, numbers),
        *_positions(config, numbers),
    ]


def _divisions(config: Config, numbers: ModelNumbers) -> Iterator[Problem]:
    parallel, engine = config.parallel, config.rollout.tensor_parallel_size
    rows = [
        ("parallel.tensor", parallel.tensor, "attention heads", numbers.heads),
        ("parallel.tensor", parallel.tensor, "key/value heads", numbers.kv_heads),
        ("parallel.tensor", parallel.tensor, "feed-forward width", numbers.ffn),
        ("parallel.expert", parallel.expert, "experts", numbers.experts),
        ("parallel.expert_tensor", config.derived.expert_tensor, "expert feed-forward width", numbers.expert_ffn),
        ("rollout.tensor_parallel_size", engine, "attention heads", numbers.heads),
    ]
    for key, ways, what, size in rows:
        if size and size % ways:
            legal = [d for d in range(1, size + 1) if size % d == 0 and d <= 2 * ways]
            yield Problem(
                key, ways, f"Does not divide the model's {what} = {size}: use one of {', '.join(map(str, legal))}."
            )


def _stages(config: Config, numbers: ModelNumbers) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.pipeline == 1 or parallel.pipeline_layout is not None:
        return
    ends = [n for n in (parallel.first_stage_layers, parallel.last_stage_layers) if n is not None]
    stages, layers = parallel.pipeline - len(ends), numbers.layers - sum(ends)
    chunks = parallel.virtual_pipeline or 1
    if layers < stages or (layers and not stages) or (stages and layers % stages):
        yield Problem(
            "parallel.pipeline",
            parallel.pipeline,
            f"{layers} layers do not spread evenly over {stages} stages"
            + (f" (of {numbers.layers} layers, first/last stage take {sum(ends)})" if ends else "")
            + ": choose another number, parallel.first_stage_layers / last_stage_layers, or a parallel.pipeline_layout.",
        )
    elif any(n % chunks for n in [*ends, layers // stages if stages else 0]):
        yield Problem(
            "parallel.virtual_pipeline",
            chunks,
            f"Does not divide the layers of each stage ({ends + [layers // stages]}).",
        )


def _experts(config: Config, numbers: ModelNumbers) -> Iterator[Problem]:
    parallel, model = config.parallel, config.model
    if not numbers.experts:
        if parallel.expert > 1:
            yield Problem("parallel.expert", parallel.expert, "The model has no experts: set 1.")
        if model.router_replay != "none":
            yield Problem("model.router_replay", model.router_replay, "The model has no router: set none.")
        if model.moe.load_balancing != "none":
            yield Problem("model.moe.load_balancing", model.moe.load_balancing, "The model has no router: set none.")
    elif parallel.tensor > 1 and not config.derived.sequence_parallel:
        yield Problem(
            "parallel.sequence_parallel",
            False,
            "Experts under tensor parallelism are trained with it only: set null or true.",
        )


def _positions(config: Config, numbers: ModelNumbers) -> Iterator[Problem]:
    longest = config.derived.max_model_len
    if numbers.max_positions and longest > numbers.max_positions:
        yield Problem(
            "data.max_response_length",
            config.data.max_response_length,
            f"With data.max_prompt_length = {config.data.max_prompt_length} a sequence may reach {longest} tokens, but the model was "
            f"made for {numbers.max_positions}: lower one of the two.",
        )
