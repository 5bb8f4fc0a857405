"""From `recipe=demo actor.optim.lr=3e-5` to a checked Config: Hydra composes, the schema and the checks judge."""

import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.config.checks import Command, check
from megatron_dapo.config.problems import ConfigError, Problem, nearest
from megatron_dapo.config.schema import Config, build_leniently
from megatron_dapo.config.verl import translate_verl

CONFIG_DIR_VARIABLE = "MEGATRON_DAPO_CONFIG_DIR"  # as `config_dir`, for the processes that a command starts
log = logging.getLogger(__name__)
GROUPS = ("recipe", "model", "parallel", "algorithm", "rollout", "data")


def load_config(
    overrides: Sequence[str] = (),
    recipe: str | None = None,
    *,
    command: Command | None = None,
    config_dir: str | Path | None = None,
) -> Config:
    """Compose `configs/`, the recipe and the overrides into a Config.

    `overrides` are `a.b.c=value` (Hydra's grammar) or `group=name` for a file of `configs/GROUP/NAME.yaml`;
    `config_dir` is a second directory searched for such files. verl's spellings are accepted with a note. `command`
    ("train", "sft") says whose required keys must be there; None requires none. Raises ConfigError with all problems:
    unknown keys, types, ranges, and keys that contradict each other.
    """
    translation = translate_verl(overrides)
    for note in translation.notes:
        log.warning("deprecated spelling: %s", note)
    values = compose(translation.overrides, recipe, config_dir)
    config, problems = build_leniently(values)
    broken = {problem.key.partition("[")[0] for problem in problems}
    problems += [found for found in check(config, command) if not broken.intersection((found.key, *found.others))]
    if problems:
        raise ConfigError(problems)
    return config


def compose(
    overrides: Sequence[str], recipe: str | None = None, config_dir: str | Path | None = None
) -> dict[str, Any]:
    """The composed tree as plain values, unchecked. Interpolations `${data.train_batch_size}` are resolved."""
    from hydra import compose as hydra_compose  # late: a second of import that most uses of a Config do not need
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    given = ([f"recipe={recipe}"] if recipe else []) + list(overrides)
    config_dir = config_dir or os.environ.get(CONFIG_DIR_VARIABLE)
    _check_groups(given, config_dir)
    if config_dir is not None:
        given.append(f"hydra.searchpath=[file://{Path(config_dir).resolve()}]")
    try:
        with initialize_config_dir(config_dir=str(configs_root()), version_base="1.3"):
            composed = hydra_compose("config", overrides=[_forced(text) for text in given])
        complete = OmegaConf.merge(OmegaConf.create(Config().model_dump(mode="json")), composed)
        resolved = OmegaConf.to_container(complete, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([Problem("overrides", " ".join(given), _first_lines(error))]) from error
    return _pruned(resolved, OmegaConf.to_container(composed))


def configs_root() -> Path:
    """The directory of the YAML files: beside the package in a checkout, else under the environment's share/."""
    places = [Path(__file__).parents[2] / "configs", Path(sys.prefix) / "share" / "megatron-dapo" / "configs"]
    for place in places:
        if (place / "config.yaml").is_file():
            return place
    raise ConfigError(
        [Problem("configs", None, f"The YAML files are in none of {', '.join(map(str, places))}. Reinstall.")]
    )


def choices(group: str, config_dir: str | Path | None = None) -> list[str]:
    """Names that `group=NAME` accepts."""
    roots = [configs_root(), *([Path(config_dir)] if config_dir is not None else [])]
    return sorted({path.stem for root in roots for path in (root / group).glob("*.yaml")})


def _check_groups(overrides: Sequence[str], config_dir: str | Path | None) -> None:
    problems = []
    for text in overrides:
        key, equals, value = text.lstrip("+").partition("=")
        if not equals and not text.startswith("~"):
            problems.append(Problem(text, None, "Is not an override: write key=value."))
        elif key in GROUPS and value not in (known := choices(key, config_dir)):
            near = nearest(value, known)
            hint = f" Did you mean {near}?" if near else ""
            problems.append(
                Problem(key, value, f"There is no such file in configs/{key}.{hint} There are: {', '.join(known)}.")
            )
        elif not re.fullmatch(r"[A-Za-z_][\w.-]*", key) and not text.startswith("~"):
            problems.append(
                Problem(text, None, "Is not an override: the key is a dotted name, e.g. actor.optim.lr=1e-6.")
            )
    if problems:
        raise ConfigError(problems)


def _forced(text: str) -> str:
    """Hydra adds or replaces a key that is marked `++`; whether the key exists is for the schema to say."""
    key = text.lstrip("+").partition("=")[0]
    return text if key in GROUPS or key.startswith(("~", "hydra.")) else "++" + text.lstrip("+")


def _pruned(values: Any, shape: Any) -> Any:
    """`values` cut down to the keys that `shape` has: defaults stay the schema's, so it knows what was set."""
    if not isinstance(shape, dict) or not isinstance(values, dict):
        return values
    return {key: _pruned(values[key], shape[key]) for key in shape}


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split("\n")[:3]).strip()
