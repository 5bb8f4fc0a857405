"""What a run says about itself: typed metrics, their families, the MoE load balance, and the trackers they go to."""

from megatron_dapo.metrics.data import data_metrics, sequence_balance_metrics
from megatron_dapo.metrics.jsonl import METRICS_FILE, JsonlWriter, read_jsonl
from megatron_dapo.metrics.timing import Timer, memory_metrics, throughput_metrics, timing_metrics
from megatron_dapo.metrics.trackers import Trackers
from megatron_dapo.metrics.typed import (
    ExplainedVariance,
    Histogram,
    Last,
    Max,
    Mean,
    Metric,
    Metrics,
    Min,
    Std,
    Sum,
    compute,
    masked_mean,
    merge,
    reduce,
    settle,
    stats,
)

__all__ = [
    "METRICS_FILE",
    "ExplainedVariance",
    "Histogram",
    "JsonlWriter",
    "Last",
    "Max",
    "Mean",
    "Metric",
    "Metrics",
    "Min",
    "Std",
    "Sum",
    "Timer",
    "Trackers",
    "compute",
    "data_metrics",
    "masked_mean",
    "memory_metrics",
    "merge",
    "read_jsonl",
    "reduce",
    "sequence_balance_metrics",
    "settle",
    "stats",
    "throughput_metrics",
    "timing_metrics",
]
