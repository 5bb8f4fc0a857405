"""Sums that run backwards through time: x_t = value_t + gain_t·x_{t+1}, for all t at once."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def reverse_scan(value: Float[Tensor, "b t"], gain: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Solve x_t = value_t + gain_t·x_{t+1} with x = 0 beyond the end.

    Doubling: after k rounds each position has absorbed the 2^k values behind it, so log2(t) rounds of whole-tensor
    operations do what a Python loop does in t. With |gain| ≤ 1 nothing grows.
    """
    width = value.shape[-1]
    reach = 1
    while reach < width:
        behind = torch.nn.functional.pad(value[:, reach:], (0, reach))
        value = value + gain * behind
        gain = gain * torch.nn.functional.pad(gain[:, reach:], (0, reach))
        reach *= 2
    return value


def reward_to_go(
    token_rewards: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], gamma: float = 1.0
) -> Float[Tensor, "b t"]:
    """G_t = r_t + gamma·G_{next valid t}. Time passes only at valid tokens: masked spans carry the sum on undiscounted.

    A reward on a masked position (a token rejected after it was rewarded) belongs to the valid token before it.
    """
    return reverse_scan(token_rewards, torch.where(mask, gamma, 1.0).to(token_rewards.dtype))


def next_valid(x: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """At each position the value of `x` at the nearest valid position after it, 0 where there is none."""
    held = reverse_scan(torch.where(mask, x, 0.0), (~mask).to(x.dtype))
    return torch.nn.functional.pad(held[:, 1:], (0, 1))
