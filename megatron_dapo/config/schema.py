"""The whole configuration as one frozen tree, and its way to and from YAML."""

from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_dapo.config.algorithm import AlgorithmConfig
from megatron_dapo.config.base import Section
from megatron_dapo.config.derived import Derived, derive, explain
from megatron_dapo.config.model import ModelConfig, ParallelConfig
from megatron_dapo.config.problems import ConfigError, Problem, from_validation
from megatron_dapo.config.sampling import DataConfig, RewardConfig, RolloutConfig
from megatron_dapo.config.trainer import TrainerConfig
from megatron_dapo.config.training import ActorConfig, CriticConfig, RefConfig, SFTConfig


class _Dumper(yaml.SafeDumper):
    """Sections as blocks, lists on one line."""


_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)
)


class Config(Section):
    """Everything a run depends on. `config.derived` says what the keys left at null come to."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    sft: SFTConfig = SFTConfig()

    @cached_property
    def derived(self) -> Derived:
        return derive(self)

    def to_yaml(self) -> str:
        """Every key with its value; a key at null carries what it comes to as a comment. `from_yaml` reads it back."""
        text = yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, width=1000)
        return _annotate(text, explain(self))

    def save(self, run_dir: str | Path) -> Path:
        """Write `config.yaml` into the run directory (created if need be)."""
        path = Path(run_dir) / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_yaml(), encoding="utf-8")
        return path

    @classmethod
    def from_yaml(cls, path: str | Path) -> "Config":
        """Read what `save` wrote."""
        path = Path(path)
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError([Problem(str(path), None, f"Cannot be read as a configuration: {error}.")]) from error
        return build(content)


def build(values: dict[str, Any]) -> Config:
    """`values` checked for types, ranges and unknown keys. Raises ConfigError with every problem found."""
    config, problems = build_leniently(values)
    if problems:
        raise ConfigError(problems)
    return config


def build_leniently(values: dict[str, Any]) -> tuple[Config, list[Problem]]:
    """The config of what is valid in `values` (the rest at its default), and what is wrong with the rest."""
    problems: list[Problem] = []
    while True:
        try:
            return Config.model_validate(values), problems
        except ValidationError as error:
            found = from_validation(error, Config)
            problems += found
            for problem in found:
                values = _without(values, problem.key.partition("[")[0].split("."))


def problem(config: Config, key: str, text: str, *others: str) -> Problem:
    """A finding about the dotted `key` at its present value."""
    value: Any = config
    for name in key.split("."):
        value = value.__dict__[name]
    return Problem(key, "null" if value is None else value, text, others)


def _without(values: Any, path: list[str]) -> Any:
    if not path or not isinstance(values, dict):
        return {}
    head, *rest = path
    if not rest:
        return {key: value for key, value in values.items() if key != head}
    return {key: _without(value, rest) if key == head else value for key, value in values.items()}


def _annotate(text: str, comments: dict[str, str]) -> str:
    """Append `comments[dotted key]` to the line of that key."""
    lines: list[str] = []
    path: list[str] = []
    for line in text.splitlines():
        indent = (len(line) - len(line.lstrip())) // 2
        path = [*path[:indent], line.strip().partition(":")[0]]
        comment = comments.get(".".join(path))
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"
