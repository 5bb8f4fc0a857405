"""What is asked, sampled and scored: the sections `data`, `rollout` and `reward`."""

from typing import Any, Literal

from megatron_dapo.config.base import (
    Count,
    Every,
    Float,
    Fraction,
    Int,
    NonNegative,
    NonNegativeInt,
    Positive,
    Section,
    Strings,
)
from megatron_dapo.config.model import Dtype


class DataConfig(Section):
    """Prompt files and the batch sizes that are counted in prompts."""

    train_files: Strings = ()
    """Parquet or JSONL files (or HF dataset directories) in the verl schema."""
    val_files: Strings = ()
    """Held-out files; empty: no validation."""
    train_batch_size: Count = 512
    """Prompts trained per step (global)."""
    gen_batch_size: Count | None = None
    """Prompts drawn per generation batch (global); null: `train_batch_size`."""
    max_prompt_length: Count = 512
    """Tokens; what happens to longer prompts is `truncation`."""
    max_response_length: Count = 512
    """Tokens; generation stops here."""
    truncation: Literal["error", "drop", "left", "right", "middle"] = "error"
    """What happens to a prompt longer than `max_prompt_length`."""
    filter_overlong_prompts: bool = False
    """Remove overlong prompts once, when the files are read."""
    shuffle: bool = True
    """A new order every epoch, from (seed, epoch)."""
    seed: Int = 1
    """Seed of that order."""
    prompt_key: str = "prompt"
    """Column that holds the chat."""
    system_prompt: str | None = None
    """Put before every chat that has no system message."""
    apply_chat_template: bool = True
    """false: the model continues the bare text of the turns (base models, few-shot prompts)."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the tokenizer's chat template, e.g. {enable_thinking: false}."""
    train_max_samples: Every = -1
    """Use only the first so many training prompts; -1: all."""
    val_max_samples: Every = -1
    """Use only the first so many validation prompts; -1: all."""


class ValKwargs(Section):
    """Sampling during validation."""

    n: Count = 1
    """Responses per validation prompt."""
    temperature: NonNegative = 1.0
    """Sampling temperature."""
    top_p: Fraction = 0.7
    """Nucleus mass."""
    top_k: Every = -1
    """Candidates; -1: all."""
    do_sample: bool = True
    """false: greedy decoding."""


class AgentConfig(Section):
    """The loop around the engine: one answer, or several turns with tools."""

    name: str = "single_turn"
    """single_turn, calculator, or an agent of your own as `package.module:function`."""
    max_turns: Count = 1
    """Most model turns in one trajectory."""


class RolloutConfig(Section):
    """vLLM engines and how they sample."""

    n: Count = 16
    """Responses per prompt: the size of a group."""
    temperature: Positive = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: Fraction = 1.0
    """Nucleus mass."""
    top_k: Every = -1
    """Candidates; -1: all."""
    tensor_parallel_size: Count = 1
    """Ranks of one engine."""
    engines: Count | None = None
    """Engines; null: one per `tensor_parallel_size` GPUs, one on a machine without."""
    dtype: Dtype | None = None
    """Precision; null: model.dtype."""
    max_num_seqs: Count = 256
    """Sequences that one engine runs at once."""
    max_num_batched_tokens: Count | None = None
    """Tokens of one engine step; null: vLLM's choice."""
    gpu_memory_utilization: Fraction = 0.5
    """Share of device memory for the engine (GPU)."""
    kv_cache_gb: Positive = 1.0
    """KV cache of an engine, GiB (CPU)."""
    enforce_eager: bool | None = None
    """No graph capture; null: true on a machine without GPU, false with."""
    enable_prefix_caching: bool = True
    """Share the KV cache of equal prompts."""
    weight_transport: Literal["auto", "shared_memory", "ring", "cuda_ipc", "peers", "files"] = "auto"
    """How weights reach the engines. auto: on one host `shared_memory`, or `cuda_ipc` (GPU memory) for engines on the
    trainer's GPUs; else `peers` (send and receive). `ring`: shared memory of two buckets, less of it and both sides at
    work at once. `files`: through `<run>/weights`, on a file system that all hosts share."""
    weight_check_every: Count = 1
    """Compare the checksum of every so manyth slice in a push, other ones each time; 1: of all."""
    stop: Strings = ()
    """Strings that end a response."""
    ignore_eos: bool = False
    """Generate on to the length limit (benchmarks)."""
    calculate_log_probs: bool = True
    """Return the log-probability of every sampled token."""
    engine_kwargs: dict[str, Any] = {}
    """Passed through to vLLM's engine arguments."""
    failed_groups: Literal["evict", "keep"] = "evict"
    """Asynchronous modes, when some samples of a group fail: replace the group, or train on those that are left."""
    val_kwargs: ValKwargs = ValKwargs()
    agent: AgentConfig = AgentConfig()


class OverlongBufferConfig(Section):
    """Soft overlong punishment (DAPO): a linear penalty over the last `len` tokens before the limit."""

    enable: bool = False
    """Shape the reward by length."""
    len: NonNegativeInt = 0
    """Tokens before data.max_response_length over which the penalty grows."""
    penalty_factor: NonNegative = 1.0
    """Penalty at the limit."""
    log: bool = False
    """Report the penalty and the share of overlong responses."""
    unbounded: bool = False
    """Let the penalty grow past `penalty_factor`, as the reference does."""


class CustomFunctionConfig(Section):
    """A user's own `compute_score(data_source, solution_str, ground_truth, extra_info)`."""

    path: str | None = None
    """Python file; null: the built-in functions."""
    name: str = "compute_score"
    """Function in that file."""
    kwargs: dict[str, Any] = {}
    """Extra keyword arguments of every call."""


class RewardModelConfig(Section):
    """A model as an additional source of reward."""

    enable: bool = False
    """Add its score to the rule's."""
    path: str = ""
    """Hugging Face sequence classifier, or the http:// address of a pooling server."""
    weight: Float = 1.0
    """Factor on its score."""
    offload_param: bool = False
    """Keep the classifier's parameters in host memory except while it scores."""


class RewardConfig(Section):
    """Verifiers, their process pool, and shaping."""

    manager: Literal["dapo"] = "dapo"
    """Reward manager."""
    strict: bool = False
    """Only the published math_dapo rules, to reproduce published numbers."""
    rule_weight: Float = 1.0
    """Factor on the verifier's (or the own function's) score; `reward_model.weight` is the model's."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    custom_function: CustomFunctionConfig = CustomFunctionConfig()
    num_workers: Count = 2
    """Verifier processes."""
    timeout_s: Positive = 10.0
    """Seconds that one verdict may take."""
    retries: NonNegativeInt = 1
    """Further tries after a worker died or timed out."""
    on_failure: Literal["drop", "zero", "raise"] = "drop"
    """After the last try: drop the sample, score it 0, or end the run. Always counted."""
    reward_model: RewardModelConfig = RewardModelConfig()
