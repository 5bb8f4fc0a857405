"""GAE: the critic's estimate of how much better each token was than expected."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.advantages.base import AdvantageConfig, Estimate, register_advantage, sequence_scores
from megatron_dapo.algorithms.groups import GroupIds
from megatron_dapo.algorithms.masked import masked_whiten, real, valid
from megatron_dapo.algorithms.scan import next_valid, reverse_scan


@register_advantage("gae", needs=("values",))
def gae(
    token_rewards: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    group_ids: GroupIds | None,
    *,
    config: AdvantageConfig,
    values: Float[Tensor, "b t"],
    **_: Any,
) -> Estimate:
    """A_t = δ_t + gamma·lam·A_{t+1}, with δ_t = r_t + gamma·V_{t+1} - V_t, whitened over the batch.

    Source: arXiv:1506.02438, eq. 16. The next token is the next valid one: spans of masked tokens (tool output) are
    passed over without discount. A reward on a masked position belongs to the valid token before it. Returns are A + V
    before whitening.
    """
    sequence_scores(token_rewards)
    values = valid(real(values), mask)
    ahead = next_valid(values, mask)
    delta = torch.where(mask, token_rewards + config.gamma * ahead - values, token_rewards)
    gain = torch.where(mask, config.gamma * config.lam, 1.0).to(delta.dtype)
    raw = reverse_scan(delta, gain)
    return masked_whiten(raw, mask), valid(raw + values, mask)
