"""How a per-token loss becomes one number, so that the gradient is the same for any split of the batch.

Every mode is a sum over local tokens divided by a count. Give the count of the whole optimizer step (`global_tokens`,
`global_sequences`), and the sum of the results over micro-batches, then the mean over data-parallel ranks, is the loss
of the undivided batch: `dp_size` cancels the division by the number of ranks in gradient averaging.
"""

from typing import Literal, get_args

from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.masked import real, valid

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
AGGREGATION_MODES: tuple[str, ...] = get_args(AggregationMode)


def aggregate_loss(
    loss: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    mode: str,
    *,
    global_tokens: int | Tensor | None = None,
    global_sequences: int | Tensor | None = None,
    dp_size: int = 1,
    horizon: int | float | None = None,
) -> Float[Tensor, ""]:
    """Reduce a per-token loss to a scalar.

    With n_i valid tokens in row i, N_tok tokens and N_seq sequences in the whole optimizer step:

    - token-mean: Σ_it loss / N_tok (DAPO, arXiv:2503.14476, eq. 8)
    - token-sum: Σ_it loss
    - seq-mean-token-sum: Σ_i Σ_t loss / N_seq (Dr. GRPO, arXiv:2503.20783, up to a constant)
    - seq-mean-token-mean: Σ_i (Σ_t loss / n_i) / N_seq (GRPO, arXiv:2402.03300, eq. 3)
    - seq-mean-token-sum-norm: seq-mean-token-sum / horizon (Dr. GRPO with its constant, the longest response allowed)

    Without `global_tokens` or `global_sequences` the local counts are used (rows with a valid token count as
    sequences), which is right only when this call sees the whole optimizer step; `dp_size` > 1 therefore demands the
    global count. Without `horizon` the padded width stands in for it, which makes the loss depend on padding: training
    passes `horizon`. A batch without valid tokens gives 0 and a zero gradient, in every mode.
    """
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; it must be one of {list(AGGREGATION_MODES)}")
    mask = mask.bool()
    loss = valid(real(loss), mask)
    if mode == "token-sum":
        return loss.sum() * dp_size
    if mode == "token-mean":
        tokens = _denominator("global_tokens", mode, global_tokens, dp_size, mask)
        return loss.sum() / tokens * dp_size
    sequences = _denominator("global_sequences", mode, global_sequences, dp_size, mask)
    if mode == "seq-mean-token-mean":
        return (loss.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences * dp_size
    total = loss.sum() / sequences * dp_size
    if mode == "seq-mean-token-sum":
        return total
    return total / (mask.shape[-1] if horizon is None else horizon)


def _denominator(
    name: str, mode: str, given: int | Tensor | None, dp_size: int, mask: Bool[Tensor, "b t"]
) -> int | float | Tensor:
    if given is not None:
        # A step may be all padding; its numerator is 0 then and 0 / 1 is the answer.
        return given.clamp(min=1) if isinstance(given, Tensor) else max(given, 1)
    if dp_size > 1:
        raise ValueError(f"{mode} with dp_size={dp_size} needs {name}, the count over all ranks and micro-batches")
    counted = mask if name == "global_tokens" else mask.any(-1)
    return counted.sum().clamp(min=1)
