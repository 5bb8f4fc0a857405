"""The losses that plug into the engine: policy (DAPO), value and supervised. Each returns its share of a global loss.

A mini-batch fixes its global counts once (`Normalizer`); every micro-batch divides by them, so the summed gradient
does not depend on how rows were split over micro-batches and ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Bool, Float
from tensordict import TensorDict
from torch import Tensor

from megatron_dapo.algorithms import (
    PolicyLossConfig,
    aggregate_loss,
    effective_loss_mode,
    kl_loss,
    policy_loss,
    value_loss,
)
from megatron_dapo.algorithms.measured import Measured
from megatron_dapo.config.training import ActorConfig, CriticConfig
from megatron_dapo.metrics import Mean, Metrics, Sum, agreement_metrics, measured

LossFunction = Callable[[dict[str, Tensor], TensorDict], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class Normalizer:
    """The global denominators of one optimizer step."""

    mode: str
    tokens: int
    sequences: int
    horizon: float | None = None

    def __call__(self, loss: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, ""]:
        return aggregate_loss(
            loss, mask, self.mode, global_tokens=self.tokens, global_sequences=self.sequences, horizon=self.horizon
        )


def _told(metrics: Mapping[str, float | Measured], mask: Bool[Tensor, "b t"]) -> Metrics:
    """What a loss says of a micro-batch, so that merging stays exact: plain means weigh as many tokens as there are."""
    weight = float(mask.sum())
    means = {name: Mean(one * weight, weight) for name, one in metrics.items() if isinstance(one, float)}
    return means | measured({name: one for name, one in metrics.items() if isinstance(one, Measured)})


def _fields(rows: TensorDict, width: int) -> dict[str, Tensor]:
    """The per-token fields `[b, t]` of the rows, cut to the width of this micro-batch."""
    return {name: value[:, :width] for name, value in rows.items() if value.dim() == 2 and name != "prompts"}


def actor_loss(
    actor: ActorConfig, config: PolicyLossConfig, normalizer: Normalizer, *, fresh: bool = False
) -> LossFunction:
    """L = policy − entropy_coeff · entropy + kl_loss_coef · KL(policy ‖ reference), each aggregated the same way.

    Rows without `old_log_probs` are on-policy by construction: the ratio is one and only its gradient matters. `fresh`
    says that the weights are still those that sampled: then rows with `rollout_log_probs` tell how far the two agree,
    and the entropy is that of the policy that sampled.
    """
    token_loss = policy_loss(effective_loss_mode(actor.policy_loss.loss_mode, config))

    def loss(tokens: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, Metrics]:
        logprob = tokens["log_probs"]
        field = _fields(rows, logprob.shape[1])
        mask = field["response_mask"]
        old = field["old_log_probs"] if "old_log_probs" in field else logprob.detach()
        per_token, metrics = token_loss(
            logprob, old, field["advantages"], mask, config, rollout_is_weights=field.get("rollout_is_weights")
        )
        total = normalizer(per_token, mask)
        report: Metrics = {**_told(metrics, mask), "actor/pg_loss": Sum(float(total.detach()))}
        if actor.entropy_coeff:
            entropy = normalizer(tokens["entropy"], mask)
            report["actor/entropy_loss"] = Sum(float(entropy.detach()))
            total = total - actor.entropy_coeff * entropy
        if actor.use_kl_loss:
            kl = normalizer(kl_loss(logprob, field["ref_log_prob"], mask, actor.kl_loss_type), mask)
            report["actor/kl_loss"] = Sum(float(kl.detach()))
            report["actor/kl_coef"] = Mean(actor.kl_loss_coef, 1)
            total = total + actor.kl_loss_coef * kl
        report["actor/loss"] = Sum(float(total.detach()))
        if fresh and "rollout_log_probs" in field:
            report |= agreement_metrics(logprob.detach(), field["rollout_log_probs"], mask)
            if "entropy" in tokens:
                report["actor/entropy"] = Mean(float((tokens["entropy"].detach() * mask).sum()), float(mask.sum()))
        return total, report

    return loss


def critic_loss(critic: CriticConfig, normalizer: Normalizer) -> LossFunction:
    """Half the clipped squared error of the values against the returns."""

    def loss(tokens: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, Metrics]:
        values = tokens["values"]
        field = _fields(rows, values.shape[1])
        mask = field["response_mask"]
        per_token, metrics = value_loss(
            values, field["returns"], field["values"], mask, cliprange=critic.cliprange_value
        )
        total = normalizer(per_token, mask)
        return total, {**_told(metrics, mask), "critic/vf_loss": Sum(float(total.detach()))}

    return loss


def supervised_loss(normalizer: Normalizer) -> LossFunction:
    """Negative log-likelihood of the response tokens."""

    def loss(tokens: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, Metrics]:
        logprob = tokens["log_probs"]
        mask = _fields(rows, logprob.shape[1])["response_mask"]
        total = normalizer(-logprob, mask)
        return total, {"sft/loss": Sum(float(total.detach()))}

    return loss
