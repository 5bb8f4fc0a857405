"""One rollout engine in words: the model, its size, and what that means for the environment and arguments of vLLM."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dapo.resharding.vllm_plugin import BACKEND

CPU_BLOCK_SIZE = 32  # vLLM's CPU default of 128 never finds a shared prefix in short prompts
EXTENSION = "megatron_dapo.rollout.routing.RolloutWorkerExtension"
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])  # our child must find this package wherever we were started
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
LAUNCHER_NAMES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
}


@dataclass(frozen=True)
class EngineSpec:
    """Everything needed to start one engine.

    `cpus` are the cores it may use and `gpus` the CUDA devices (None: all it sees). `load_format="dummy"` skips
    reading weights from disk when the first push is going to replace them anyway.
    """

    model: str
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.5
    kv_cache_gb: float = 1.0
    enforce_eager: bool | None = None  # None: eager on CPU, compiled on GPU
    enable_prefix_caching: bool = True
    load_format: str = "auto"
    routed_experts: bool = False
    sleeps: bool = False  # GPU: the engine can give its memory to the trainer between rollouts
    seed: int = 0
    name: str = "rollout-0"
    cpus: tuple[int, ...] | None = None
    gpus: tuple[int, ...] | None = None
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)


def environment(spec: EngineSpec, on_cpu: bool, parent: Mapping[str, str]) -> dict[str, str]:
    """The environment of the engine's process: the parent's, without its launcher's ranks, with vLLM's settings."""
    env = {k: v for k, v in parent.items() if k not in LAUNCHER_NAMES and not k.startswith(LAUNCHER_PREFIXES)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (PACKAGE_ROOT, env.get("PYTHONPATH"))))
    env.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    env.setdefault("PYTHONWARNINGS", "ignore")
    env.setdefault("HF_HUB_OFFLINE", "1")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core lives in our process: one process less, faster start
    if spec.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.gpus))
    if on_cpu:
        env["TORCHDYNAMO_DISABLE"] = "1"  # eager mode alone still compiles the sampler
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # trainers want the cores between our steps
        env["VLLM_CPU_OMP_THREADS_BIND"] = threads_bind(spec)
    return env


def threads_bind(spec: EngineSpec) -> str:
    """vLLM's core list per tensor-parallel rank, e.g. `0-3|4-7`; on one memory node it cannot find the split itself."""
    cpus = spec.cpus if spec.cpus is not None else tuple(sorted(os.sched_getaffinity(0)))
    if spec.tensor_parallel_size == 1 and spec.cpus is None:
        return "auto"
    share = max(1, len(cpus) // spec.tensor_parallel_size)
    ranks = [cpus[(r * share) % len(cpus) :][:share] for r in range(spec.tensor_parallel_size)]
    return "|".join(",".join(map(str, r)) for r in ranks)


def vllm_arguments(spec: EngineSpec, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs`. `engine_kwargs` of the user come last and win."""
    eager = spec.enforce_eager if spec.enforce_eager is not None else on_cpu
    arguments: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "enforce_eager": eager,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "load_format": spec.load_format,
        "seed": spec.seed,
        # the distribution that is sampled, after temperature and filters: what a policy-gradient ratio needs
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": EXTENSION,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "skip_tokenizer_init": not has_tokenizer(spec.model),
    }
    if spec.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = int(spec.kv_cache_gb * 2**30)
        arguments["block_size"] = CPU_BLOCK_SIZE
    else:  # untested on GPU
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
        arguments["enable_return_routed_experts"] = spec.routed_experts
        arguments["enable_sleep_mode"] = spec.sleeps
    if "speculative_config" in spec.engine_kwargs:  # untested on GPU
        arguments["per_request_spec_decode_metrics"] = "summary"
    return arguments | dict(spec.engine_kwargs)


def has_tokenizer(model: str) -> bool:
    """Whether the model directory brings a tokenizer; without one only token ids go in and out (no stop strings)."""
    return any(os.path.exists(os.path.join(model, f)) for f in ("tokenizer.json", "tokenizer_config.json"))
