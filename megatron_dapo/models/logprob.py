"""Log-probability, entropy and Σπ² of every token, from logits whose vocabulary is split over tensor-parallel ranks.

Computed in float32 a few tokens at a time, forwards and backwards: beyond the logits themselves (in the model's dtype)
no copy of [tokens, vocabulary] ever exists. All three are differentiable.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

STATISTICS = ("log_probs", "entropy", "sum_pi_squared")
_CHUNK_BYTES = 32 << 20  # of float32 copies of logits in hand at a time
_HEAD_CHUNK_BYTES = 128 << 20  # of logits made from hidden states at a time
_KEEP_BYTES = 512 << 20  # logits of so many bytes are kept for the backward pass rather than computed again


def token_statistics(
    logits: Float[Tensor, "t v_tp"],
    labels: Int[Tensor, "t"],
    names: Sequence[str],
    *,
    vocab: int,
    temperature: float = 1.0,
    group: Any = None,
) -> dict[str, Float[Tensor, "t"]]:
    """The named statistics of softmax(logits / temperature), float32, the same on every rank of `group`.

    log_probs: log π(label). entropy: -Σ π log π, nats. sum_pi_squared: Σ π².
    logits: this rank's columns of the padded vocabulary; columns from `vocab` on are padding and take no part.
    group: the tensor-parallel group; None for whole logits.
    Raises ValueError for a name that is not one of `STATISTICS`.
    """
    unknown = [name for name in names if name not in STATISTICS]
    if unknown:
        raise ValueError(f"unknown token statistic {unknown[0]!r}; known are {', '.join(STATISTICS)}")
    wanted = tuple(name in names for name in STATISTICS)
    values = _Statistics.apply(logits, labels, vocab, temperature, group, wanted)
    return {name: value for name, value in zip(STATISTICS, values, strict=True) if name in names}


class _Statistics(torch.autograd.Function):
    """Forward: one pass over the logits and two all-reduces of a few numbers per token. Backward: one pass, none."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab: int,
        temperature: float,
        group: Any,
        wanted: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        columns, first = _own_columns(logits, vocab, group)
        tokens = logits.shape[0]
        local = torch.zeros(4, tokens, dtype=torch.float32, device=logits.device)  # Σe, Σe·x, Σe², label's logit
        peak = torch.full((tokens,), torch.finfo(torch.float32).min, dtype=torch.float32, device=logits.device)
        label, mine = _local_labels(labels, first, columns)
        for part in _chunks(tokens, columns):
            x = _scaled(logits[part, :columns], temperature)
            peak[part] = x.amax(-1)
            local[3, part] = torch.where(mine[part], x.gather(1, label[part, None])[:, 0], 0.0)
            x = x - peak[part, None]
            e = x.exp()
            local[0, part] = e.sum(-1)
            if wanted[1]:
                local[1, part] = torch.linalg.vecdot(e, x)
            if wanted[2]:
                local[2, part] = torch.linalg.vecdot(e, e)
        peak = _combine(local, peak, group)
        total, weighted, squares, chosen = local
        log_total = total.log()
        entropy = log_total - weighted / total
        concentration = squares / total.square()
        ctx.save_for_backward(logits, label, mine, peak + log_total, entropy, concentration)
        ctx.columns, ctx.temperature = columns, temperature
        log_probs = chosen - peak - log_total
        return log_probs, entropy if wanted[1] else None, concentration if wanted[2] else None

    @staticmethod
    def backward(
        ctx: Any, grad_log: Tensor | None, grad_entropy: Tensor | None, grad_squares: Tensor | None
    ) -> tuple[Tensor, None, None, None, None, None]:
        logits, label, mine, log_z, entropy, concentration = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        gradient[:, ctx.columns :] = 0
        for part in _chunks(logits.shape[0], ctx.columns):
            log_p = _scaled(logits[part, : ctx.columns], ctx.temperature) - log_z[part, None]
            p = log_p.exp()
            factor: Tensor | float = 0.0
            if grad_entropy is not None:
                factor = (log_p + entropy[part, None]).mul_(-grad_entropy[part, None])
            if grad_squares is not None:
                factor = factor + (p - concentration[part, None]).mul_(2 * grad_squares[part, None])
            if grad_log is not None:
                p_gradient = p.mul_(factor - grad_log[part, None])
                p_gradient.scatter_add_(1, label[part, None], (grad_log[part] * mine[part])[:, None])
            else:
                p_gradient = p.mul_(factor)
            gradient[part, : ctx.columns] = p_gradient.div_(ctx.temperature) if ctx.temperature != 1 else p_gradient
        return gradient, None, None, None, None, None


def _own_columns(logits: Tensor, vocab: int, group: Any) -> tuple[int, int]:
    """How many of this rank's columns are real, and the vocabulary index of the first."""
    width = logits.shape[1]
    first = width * group.rank() if group is not None else 0
    return max(0, min(width, vocab - first)), first


def _local_labels(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Column of each label on this rank (clamped), and whether it is here."""
    mine = (labels >= first) & (labels < first + columns)
    return (labels - first).clamp(0, max(columns - 1, 0)), mine


def _chunks(tokens: int, columns: int) -> Iterator[slice]:
    size = max(1, _CHUNK_BYTES // (4 * max(columns, 1)))
    return (slice(start, start + size) for start in range(0, tokens if columns else 0, size))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    x = logits.float()
    return x / temperature if temperature != 1 else x


def _combine(local: Tensor, peak: Tensor, group: Any) -> Tensor:
    """Bring every rank's sums, each relative to its own peak, to the common peak and add them, in place."""
    if group is None or group.size() == 1:
        return peak
    common = peak.clone()
    dist.all_reduce(common, op=dist.ReduceOp.MAX, group=group)
    shift = peak - common
    scale = shift.exp()
    local[1] = scale * (local[1] + torch.where(scale > 0, shift, 0.0) * local[0])
    local[0] *= scale
    local[2] *= scale.square()
    dist.all_reduce(local, group=group)
    return common


def head_statistics(
    hidden: Float[Tensor, "t h"],
    weight: Float[Tensor, "v_tp h"],
    labels: Int[Tensor, "t"],
    names: Sequence[str],
    *,
    vocab: int,
    temperature: float = 1.0,
    group: Any = None,
) -> dict[str, Float[Tensor, "t"]]:
    """`token_statistics` of hidden @ weightᵀ without the logits ever existing for more than a few tokens.

    They are computed again in the backward pass. `hidden` must be the same on every rank of `group`, and its gradient
    here is this rank's part of a sum over the group (`DeferredHead` prepares both). Give it only the tokens whose
    labels matter: the vocabulary projection of a prompt is then never computed.
    """
    row_bytes = hidden.element_size() * weight.shape[0]

    def statistics(part: Tensor, matrix: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        found = token_statistics(part @ matrix.t(), label, names, vocab=vocab, temperature=temperature, group=group)
        return tuple(found[name] for name in names)

    if hidden.shape[0] * row_bytes <= (_KEEP_BYTES if torch.is_grad_enabled() else _HEAD_CHUNK_BYTES):
        values = [statistics(hidden, weight, labels)]
    else:
        size = max(1, _HEAD_CHUNK_BYTES // row_bytes)
        parts = zip(hidden.split(size), labels.split(size), strict=True)
        values = [
            checkpoint(statistics, part, weight, label, use_reentrant=False, preserve_rng_state=False)
            for part, label in parts
        ]
    return {name: torch.cat(pieces) for name, pieces in zip(names, zip(*values, strict=True), strict=True)}
