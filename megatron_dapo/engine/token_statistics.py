"""Log-probability, entropy and Σπ² of each token from vocabulary-parallel logits, with exact gradients."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

NAMES = ("log_probs", "entropy", "sum_pi_squared")


def token_statistics(
    logits: Float[Tensor, "t v_tp"],
    labels: Int[Tensor, "t"],
    names: Sequence[str],
    *,
    temperature: float,
    vocab: int,
    group: dist.ProcessGroup,
) -> dict[str, Float[Tensor, "t"]]:
    """The named statistics of softmax(logits / temperature) in float32.

    Each rank of `group` holds an equal share of the padded vocabulary; columns beyond `vocab` have probability zero.
    """
    first = logits.shape[-1] * group.rank()
    results = _VocabParallel.apply(logits, labels, temperature, vocab - first, first, group, "sum_pi_squared" in names)
    return {name: value for name, value in zip(NAMES, results, strict=True) if name in names}


class _VocabParallel(torch.autograd.Function):
    """One maximum and one sum over the ranks forward, nothing backward: every rank has its own columns' gradient."""

    @staticmethod
    def forward(ctx, logits, labels, temperature, columns, first, group, squared):
        x = logits.float() / temperature
        if columns < x.shape[1]:
            x[:, max(columns, 0) :] = -torch.inf
        top = x.max(-1).values
        if group.size() > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        x = x - top[:, None]
        p = x.exp()
        here = (labels >= first) & (labels < first + x.shape[1])
        place = (labels - first).clamp(0, x.shape[1] - 1)
        chosen = torch.where(here, x.gather(1, place[:, None])[:, 0], 0.0)
        sums = torch.stack([p.sum(-1), torch.where(p > 0, p * x, 0.0).sum(-1), chosen])
        if squared:
            sums = torch.cat([sums, p.square().sum(-1)[None]])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_z = sums[0].log()
        p.div_(sums[0][:, None])
        entropy = log_z - sums[1] / sums[0]
        ctx.save_for_backward(p, place, here, log_z, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        power = sums[3] / sums[0].square() if squared else torch.zeros_like(log_z)
        ctx.mark_non_differentiable(power)
        return sums[2] - log_z, entropy, power

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy, _):
        p, place, here, _log_z, entropy = ctx.saved_tensors
        grad = p * -grad_log_prob[:, None]
        grad.scatter_add_(1, place[:, None], (grad_log_prob * here)[:, None])
        if bool(grad_entropy.any()):
            log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log()
            grad -= p * (log_p + entropy[:, None]) * grad_entropy[:, None]
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None, None, None
