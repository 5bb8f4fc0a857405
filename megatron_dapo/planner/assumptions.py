"""What a plan takes for granted, each with a number that `assume.NAME=value` replaces."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from megatron_dapo.errors import UserError


@dataclass(frozen=True)
class Assumptions:
    """Not measured on your cluster: ratios that published runs reach, and lengths that a young run has."""

    prompt_tokens: float = 0.0
    """Mean prompt length; 0: 256, or the limit where it is lower."""
    response_tokens: float = 0.0
    """Mean response length; 0: a quarter of data.max_response_length."""
    kept: float = 0.5
    """Share of groups that the group filter keeps."""
    imbalance: float = 1.2
    """Load of the busiest expert-parallel rank over the mean."""
    dense_efficiency: float = 0.5
    """Share of the peak that dense layers and attention reach in training."""
    expert_efficiency: float = 0.35
    """The same for grouped expert products."""
    decode_bandwidth: float = 0.6
    """Share of the memory bandwidth that decoding reaches."""
    decode_layer_us: float = 10.0
    """Fixed microseconds per layer of a decoding step (launches, small reductions)."""
    network_efficiency: float = 0.7
    """Share of a link's bandwidth that collectives reach."""
    overlap: float = 0.5
    """Share of tensor, context and data-parallel traffic that hides behind arithmetic; all-to-all does not."""
    host_gbs: float = 25.0
    """Device to host, GB/s, for what is offloaded."""
    fill: float = 0.9
    """Mean share of max_tokens_per_micro_batch that packing fills."""
    overhead_gib: float = 4.0
    """Context, communicators, workspaces and fragmentation of the training process."""
    engine_overhead_gib: float = 3.0
    """The same of a rollout rank, with its graphs and activations."""
    bucket_mib: float = 256.0
    """One of the two buckets of a weight push."""
    engine_sleeps: float = 1.0
    """1: the rollout engine frees its memory while the trainer works; 0: it keeps its share."""
    deferred_head: float = 1.0
    """1: vocabulary logits exist a few tokens at a time, as in this engine; 0: for a whole micro-batch."""


def assumptions(changes: Mapping[str, float]) -> Assumptions:
    """The defaults with some replaced. Raises UserError for an unknown name, naming the nearest."""
    known = [field.name for field in fields(Assumptions)]
    for name, value in changes.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise UserError(f"assume.{name}={value}: is no assumption; nearest is assume.{near}")
        if value < 0:
            raise UserError(f"assume.{name}={value}: must not be negative")
    return replace(Assumptions(), **changes)
