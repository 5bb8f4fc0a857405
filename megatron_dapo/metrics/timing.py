"""Where the seconds went: a stage timer, seconds per stage and per token, tokens per second, memory."""

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from megatron_dapo.metrics.typed import Max, Mean, Metrics, Sum

PER_RESPONSE_TOKEN = ("gen",)  # generation produces response tokens only
PER_TOKEN = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")  # these read prompt + response


class Timer:
    """Collects the seconds of a step's stages; a stage entered twice adds up.

    with timer.stage("gen"): ...
    timer.seconds  # {"gen": 12.3}
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Seconds measured elsewhere (a worker, another process)."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def pop(self) -> dict[str, float]:
        """The seconds so far, and start again from none."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def timing_metrics(stage_seconds: Mapping[str, float], response_tokens: int = 0, total_tokens: int = 0) -> Metrics:
    """`timing_s/{stage}` in seconds and `timing_per_token_ms/{stage}` in milliseconds per token.

    Generation is counted per response token, the forward and backward stages per prompt + response token, other stages
    have no per-token value. Per-token values are means weighted by tokens, so merging local updates stays exact.
    """
    metrics: Metrics = {}
    for stage, seconds in stage_seconds.items():
        metrics[f"timing_s/{stage}"] = Sum(seconds)
        tokens = response_tokens if stage in PER_RESPONSE_TOKEN else total_tokens if stage in PER_TOKEN else 0
        if tokens:
            metrics[f"timing_per_token_ms/{stage}"] = Mean(seconds * 1000, tokens)
    return metrics


def throughput_metrics(total_tokens: int, step_seconds: float, gpus: int) -> Metrics:
    """`perf/total_num_tokens`, `perf/time_per_step` (s) and `perf/throughput` (tokens per second and GPU).

    `gpus` are all devices the run holds, rollout GPUs included; a CPU host counts as one per rank and separate engine.
    """
    if gpus < 1:
        raise ValueError(f"throughput_metrics needs at least one device, got gpus={gpus}")
    return {
        "perf/total_num_tokens": Sum(total_tokens),
        "perf/time_per_step": Sum(step_seconds),
        "perf/throughput": Mean(total_tokens, step_seconds * gpus),
    }


def memory_metrics() -> Metrics:
    """Peak GiB: of the device since the last call (where there is a GPU), and of this process's resident memory.

    Each process has its own; merged, they are those of the fullest.
    """
    metrics: Metrics = {"perf/cpu_memory_used_gb": Max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)}
    if torch.cuda.is_available():
        metrics["perf/max_memory_allocated_gb"] = Max(torch.cuda.max_memory_allocated() / 2**30)
        metrics["perf/max_memory_reserved_gb"] = Max(torch.cuda.max_memory_reserved() / 2**30)
        torch.cuda.reset_peak_memory_stats()
    return metrics
