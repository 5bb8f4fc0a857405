"""The configuration of a run: typed, frozen, composed from `configs/`. Never imports torch."""

from megatron_dapo.config.checks import check, validate
from megatron_dapo.config.checks_parallel import ModelNumbers, check_model, check_world, model_problems
from megatron_dapo.config.compose import compose, configs_root, load_config
from megatron_dapo.config.problems import ConfigError, Problem
from megatron_dapo.config.schema import Config, build
from megatron_dapo.config.verl import split_words, translate_verl

__all__ = [
    "Config",
    "ConfigError",
    "ModelNumbers",
    "Problem",
    "build",
    "check",
    "check_model",
    "check_world",
    "compose",
    "configs_root",
    "load_config",
    "model_problems",
    "split_words",
    "translate_verl",
    "validate",
]
