"""What one training batch was like: scores, rewards, advantages and lengths, under the names dashboards know."""

from collections.abc import Sequence

from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor

from megatron_dapo.metrics.typed import ExplainedVariance, Histogram, Max, Mean, Metrics, Min, Std, stats

# A bin per length up to ten tokens, then bins of a tenth of the length; the same for every batch, for merging.
LENGTH_EDGES = (0.0, 0.5, *sorted({round(1.1**i) + 0.5 for i in range(150)}))


def data_metrics(batch: TensorDict, use_critic: bool = False, *, max_prompt_length: int | None = None) -> Metrics:
    """Data metrics of a batch with B trajectories, response width T (fields as in `data/batch.py`).

    Needs response_mask [B,T], response_length [B], prompt_length [B], finish_length [B], token_level_scores [B,T];
    token_level_rewards, advantages, returns [B,T] are used when a stage has added them, values [B,T] with `use_critic`.
    Scores and rewards count non-aborted trajectories only (an aborted one has no response tokens and no reward to
    speak of). `response_length/clip_ratio` is the share that hit the length limit, told by the engine's finish reason
    and not by the width of this batch, which is always hit by its longest row.
    """
    mask = batch["response_mask"].bool()
    lengths = batch["response_length"]
    alive = lengths > 0
    metrics = _sequence_metrics(batch, "token_level_scores", "critic/score", alive)
    metrics |= _sequence_metrics(batch, "token_level_rewards", "critic/rewards", alive)
    for name in ("advantages", "returns"):
        if name in batch:
            metrics |= stats(f"critic/{name}", batch[name], mask)
    if use_critic:
        metrics |= _value_metrics(batch["values"], batch["returns"], mask)
    metrics |= stats("response_length", lengths) | stats("response_length_non_aborted", lengths, alive)
    metrics["response_length"] = Histogram.of(lengths, LENGTH_EDGES)
    metrics |= stats("prompt_length", batch["prompt_length"])
    clipped = batch["finish_length"].bool()
    rows = float(lengths.numel())
    metrics["response_length/clip_ratio"] = Mean(clipped.sum(), rows)
    metrics["response_length_non_aborted/clip_ratio"] = Mean((clipped & alive).sum(), alive.sum())
    metrics["response/aborted_ratio"] = Mean((~alive).sum(), rows)
    if max_prompt_length is not None:
        metrics["prompt_length/clip_ratio"] = Mean((batch["prompt_length"] >= max_prompt_length).sum(), rows)
    for name in ("num_turns", "tool_call_counts"):
        if name in batch:
            metrics |= stats(name, batch[name])
    return metrics


def _sequence_metrics(batch: TensorDict, field: str, name: str, alive: Tensor) -> Metrics:
    if field not in batch:
        return {}
    return stats(name, batch[field].sum(-1), alive)


def _value_metrics(values: Float[Tensor, "b t"], returns: Float[Tensor, "b t"], mask: Tensor) -> Metrics:
    target, prediction = returns[mask].double(), values[mask].double()
    explained = ExplainedVariance(residual=Std.of(target - prediction), target=Std.of(target))
    return stats("critic/values", values, mask) | {"critic/vf_explained_var": explained}


def sequence_balance_metrics(lengths: Sequence[int], partition: Sequence[Sequence[int]]) -> Metrics:
    """How evenly tokens lie on the data-parallel ranks: `global_seqlen/*`, verl's names.

    `lengths[i]` is the length (prompt + response) of row i in arrival order, `partition[r]` the rows rank r trains on.
    `min`, `max`, `minmax_diff` are what a plain split in arrival order would give, `balanced_*` what the ranks hold.
    """
    if not lengths or not partition:
        return {}
    share = -(-len(lengths) // len(partition))
    plain = [sum(lengths[r * share : (r + 1) * share]) for r in range(len(partition))]
    balanced = [sum(lengths[row] for row in rows) for rows in partition]
    return {
        "global_seqlen/min": Min(min(plain)),
        "global_seqlen/max": Max(max(plain)),
        "global_seqlen/minmax_diff": Mean(max(plain) - min(plain), 1),
        "global_seqlen/balanced_min": Min(min(balanced)),
        "global_seqlen/balanced_max": Max(max(balanced)),
        "global_seqlen/mean": Mean(sum(plain), len(plain)),
    }
