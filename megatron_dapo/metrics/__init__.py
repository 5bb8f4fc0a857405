"""What a run says about itself: typed metrics, their families, the MoE load balance, and the trackers they go to."""

from megatron_dapo.metrics.data import data_metrics, sequence_balance_metrics
from megatron_dapo.metrics.efficiency import MlaDims, ModelDims, efficiency_metrics, peak_tflops
from megatron_dapo.metrics.estimates import Estimate, Samples, estimates
from megatron_dapo.metrics.jsonl import METRICS_FILE, JsonlWriter, read_jsonl
from megatron_dapo.metrics.measured import measured
from megatron_dapo.metrics.moe import MoELoadAccumulator, routing_disagreement, source_distance
from megatron_dapo.metrics.moe_log import MoELog, moe_report, what_if
from megatron_dapo.metrics.names import describe, undocumented
from megatron_dapo.metrics.placement import Placement, megatron_placement, placement_metrics
from megatron_dapo.metrics.policy import (
    agreement_metrics,
    eviction_metrics,
    spec_decode_metrics,
    staleness_metrics,
    variance_proxy_metrics,
)
from megatron_dapo.metrics.stages import group_metrics, push_metrics, reward_metrics, source_metrics, verifier_metrics
from megatron_dapo.metrics.timing import Timer, memory_metrics, throughput_metrics, timing_metrics
from megatron_dapo.metrics.trackers import Trackers
from megatron_dapo.metrics.typed import (
    Correlation,
    EffectiveShare,
    ExplainedVariance,
    Histogram,
    Last,
    Max,
    Mean,
    Metric,
    Metrics,
    Min,
    PerLayer,
    Std,
    Sum,
    compute,
    masked_mean,
    merge,
    reduce,
    settle,
    stats,
)
from megatron_dapo.metrics.validation import validation_metrics

__all__ = [
    "METRICS_FILE",
    "Correlation",
    "EffectiveShare",
    "Estimate",
    "ExplainedVariance",
    "Histogram",
    "JsonlWriter",
    "Last",
    "Max",
    "Mean",
    "Metric",
    "Metrics",
    "Min",
    "MlaDims",
    "MoELoadAccumulator",
    "MoELog",
    "ModelDims",
    "PerLayer",
    "Placement",
    "Samples",
    "Std",
    "Sum",
    "Timer",
    "Trackers",
    "agreement_metrics",
    "compute",
    "data_metrics",
    "describe",
    "efficiency_metrics",
    "estimates",
    "eviction_metrics",
    "group_metrics",
    "masked_mean",
    "measured",
    "megatron_placement",
    "memory_metrics",
    "merge",
    "moe_report",
    "peak_tflops",
    "placement_metrics",
    "push_metrics",
    "read_jsonl",
    "reduce",
    "reward_metrics",
    "routing_disagreement",
    "sequence_balance_metrics",
    "settle",
    "source_distance",
    "source_metrics",
    "spec_decode_metrics",
    "staleness_metrics",
    "stats",
    "throughput_metrics",
    "timing_metrics",
    "undocumented",
    "validation_metrics",
    "variance_proxy_metrics",
    "verifier_metrics",
    "what_if",
]
