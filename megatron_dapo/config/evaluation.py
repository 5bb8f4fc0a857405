"""What `megatron-dapo eval` is told: a tree of its own beside the run's `Config`, from plain `key=value` words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from megatron_dapo.config.base import (
    Count,
    Every,
    Fraction,
    Int,
    NonNegative,
    NonNegativeInt,
    Positive,
    Section,
    Strings,
)
from megatron_dapo.config.model import Dtype
from megatron_dapo.config.problems import ConfigError, Problem, from_validation
from megatron_dapo.config.sampling import RewardConfig


class EvalEngineConfig(Section):
    """The vLLM engine that `eval` starts itself; without meaning for `--server`."""

    dtype: Dtype | None = None
    """Precision; null: the checkpoint's own (vLLM's `auto` would halve a float32 one)."""
    tensor_parallel_size: Count = 1
    """Ranks of the engine."""
    max_num_seqs: Count = 256
    """Sequences run at once."""
    gpu_memory_utilization: Fraction = 0.9
    """Share of device memory (GPU)."""
    kv_cache_gb: Positive = 1.0
    """KV cache, GiB (CPU)."""
    engine_kwargs: dict[str, Any] = {}
    """Passed through to vLLM's engine arguments."""


class EvalServerConfig(Section):
    """How `--server URL` is asked."""

    api: Literal["completions", "chat"] = "completions"
    """completions: token ids in, as in training. chat: messages, and the server applies its own template."""
    name: str | None = None
    """The model's name there; null: the first that the server lists."""
    concurrency: Count = 64
    """Requests in flight at once."""
    retries: NonNegativeInt = 5
    """Further tries of a request after a dropped connection, an overload (429) or a server error (5xx)."""
    timeout_s: Positive = 3600.0
    """Seconds that one answer may take."""


class EvalConfig(Section):
    """An evaluation; the defaults are those of the DAPO evaluation."""

    model: str = ""
    """Hugging Face directory of the model; with `--server` its tokenizer (`server.api=chat` needs none)."""
    data: Strings = ()
    """Prompt files in the verl schema; copies of a problem are asked as samples of one."""
    n: Count | None = None
    """Samples of each problem; null: as many as the file has copies of each, or had before they were removed."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Fraction = 0.7
    """Nucleus mass."""
    top_k: Every = -1
    """Candidates; -1: all."""
    max_tokens: Count = 20480
    """Longest answer, in tokens; less where the model's positions end earlier."""
    stop: Strings = ()
    """Strings that end an answer."""
    seed: Int = 1
    """Seed of the sampling and of the bootstrap."""
    max_prompt_length: Count = 2048
    """Longer prompts, in tokens, are an error."""
    max_samples: Every = -1
    """Use only the first so many rows; -1: all."""
    prompt_key: str = "prompt"
    """Column that holds the chat."""
    system_prompt: str | None = None
    """Put before every chat that has no system message."""
    apply_chat_template: bool = True
    """false: the model continues the bare text of the turns."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the tokenizer's chat template."""
    reward: RewardConfig = RewardConfig()
    engine: EvalEngineConfig = EvalEngineConfig()
    server: EvalServerConfig = EvalServerConfig()


def load_eval_config(words: Sequence[str], *, server: bool) -> EvalConfig:
    """`key=value` words (values in YAML) as a checked EvalConfig. Raises ConfigError with all problems."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError([Problem(word, None, "Is not an override: write key=value.")])
        _put(values, key.split("."), value)
    try:
        config = EvalConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(from_validation(error, EvalConfig)) from error
    problems = list(_problems(config, server))
    if problems:
        raise ConfigError(problems)
    return config


def _put(values: dict[str, Any], path: list[str], text: str) -> None:
    key = ".".join(path)
    for part in path[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError([Problem(key, text, f"{part} already has the value {inner}.")])
        values = inner
    try:
        values[path[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([Problem(key, text, f"Is not a YAML value: {error}.")]) from error


def _problems(config: EvalConfig, server: bool) -> list[Problem]:
    problems = []
    if not config.data:
        problems.append(Problem("data", None, "Which prompt files? For example data=data/aime-2024.parquet."))
    wants_model = not server or config.server.api == "completions"
    if wants_model and not (config.model and Path(config.model).is_dir()):
        text = "Must be a Hugging Face directory, whose tokenizer makes the prompts."
        problems.append(Problem("model", config.model or None, text + (_CHAT if server else "")))
    return problems


_CHAT = " With server.api=chat the server makes them itself and no model is needed."
