"""What every policy loss shares: its call shape, its configuration, its registry and the log-ratio."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.correction.config import RolloutCorrectionConfig
from megatron_dapo.algorithms.masked import masked_mean, real, valid
from megatron_dapo.algorithms.measured import Measured
from megatron_dapo.algorithms.registry import Registry

LOG_RATIO_BOUND = 20.0  # exp(±20) is far outside any clip range and far inside float32


@dataclass(frozen=True)
class PolicyLossConfig:
    """Parameters of the policy losses, under their usual names; each loss reads its own and no others.

    `clip_ratio` sets both sides of the clip range [1 - low, 1 + high]; `clip_ratio_low` and `clip_ratio_high` override
    a side each. `clip_ratio_c` bounds the loss of a negative advantage (dual clip) at c·|A|.
    """

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0  # sapo
    tau_neg: float = 1.05  # sapo
    clip_cov_ratio: float = 2e-4  # clip_cov: share of tokens to detach
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    clip_cov_seed: int = 0
    kl_cov_ratio: float = 2e-4  # kl_cov: share of tokens to penalise
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None  # dro: must be set to use it
    rollout_correction: RolloutCorrectionConfig | None = None  # bypass_mode

    def __post_init__(self) -> None:
        if self.clip_ratio_c <= 1.0:
            raise ValueError(f"clip_ratio_c bounds the ratio from above and must exceed 1, got {self.clip_ratio_c}")
        if self.low < 0 or self.high < 0:
            raise ValueError(f"the clip range must not be negative, got low {self.low} and high {self.high}")

    @property
    def low(self) -> float:
        """How far below 1 the ratio may fall."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def high(self) -> float:
        """How far above 1 the ratio may rise."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class PolicyLoss(Protocol):
    """The one call shape.

    `logprob` (current, with gradient), `old_logprob` and `advantages` are [b, t] over the response. The result is the
    loss per token, 0 where the mask is, and metrics: numbers are means over the valid tokens of this call, which weigh
    `mask.sum()` when micro-batches are merged; all else is `Measured`. `rollout_is_weights` multiply the loss after
    clipping and carry no gradient.
    """

    def __call__(
        self,
        logprob: Float[Tensor, "b t"],
        old_logprob: Float[Tensor, "b t"],
        advantages: Float[Tensor, "b t"],
        mask: Bool[Tensor, "b t"],
        config: PolicyLossConfig,
        *,
        rollout_is_weights: Float[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t"], Mapping[str, float | Measured]]: ...


_losses: Registry[PolicyLoss] = Registry("policy loss (loss_mode)")
register_policy_loss = _losses.register
policy_loss_names = _losses.names


def policy_loss(name: str) -> PolicyLoss:
    """The policy loss registered under `name`; ValueError lists the names there are."""
    return _losses[name]


def log_ratio(
    logprob: Float[Tensor, "b t"], old_logprob: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """log π(token) - log π_old(token), 0 in padding."""
    return valid(real(logprob) - real(old_logprob), mask)


def weighted(
    loss: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], rollout_is_weights: Float[Tensor, "b t"] | None
) -> Float[Tensor, "b t"]:
    """The loss times the importance weights, if there are any; 0 in padding."""
    if rollout_is_weights is not None:
        loss = loss * rollout_is_weights.detach()
    return valid(loss, mask)


def token_covariance(
    logprob: Float[Tensor, "b t"], advantages: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """(A - mean A)·(log π - mean log π) per token, means over the valid tokens of this call; no gradient."""
    logprob = real(logprob.detach())
    return valid((advantages - masked_mean(advantages, mask)) * (logprob - masked_mean(logprob, mask)), mask)
