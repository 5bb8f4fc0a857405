"""Trained policy against sampled policy: variance proxy, log-prob agreement, staleness, speculative decoding."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.metrics.typed import Correlation, Max, Mean, Metrics, Std, Sum, stats


def variance_proxy_metrics(
    sum_pi_squared: Float[Tensor, "b t"],
    old_log_probs: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    gradient_norm: float | None = None,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> Metrics:
    """Signal and noise of the policy gradient without a second backward pass: `variance_proxy/*`.

    The squared norm of a token's score function, in logit space, is `w = 1 - 2π + Σ_v π_v²` with π its probability.
    With importance weights ρ it is scaled by ρ² (`expected_w`); tokens of weight 0 have no gradient and drop out.
    `W_i = Σ_t w` and `A_i` is the mean advantage of trajectory i.

    * proxy1 = gradient_norm² (signal strength)
    * proxy2 = mean_i A_i² W_i, with importance weights mean_i (mean_t ρ)² A_i² W_i (total power)
    * proxy3 = max(0, (proxy2 - proxy1) / (N - 1)) over N trajectories (noise); needs the gradient norm and N > 1
    """
    if advantages.shape[0] == 0:
        return {}
    mask = mask.bool()
    tokens = mask.sum(-1).clamp(min=1)

    def row_sum(x: Tensor) -> Float[Tensor, " b"]:
        return torch.where(mask, x.double(), 0.0).sum(-1)

    w = 1 - 2 * old_log_probs.double().exp() + sum_pi_squared.double()
    a_squared = (row_sum(advantages) / tokens).square()
    if rollout_is_weights is None:
        scaled = row_sum(w)
        power = a_squared * scaled.clamp(min=0)
    else:
        scaled = row_sum(w * rollout_is_weights.double().square())
        kept = row_sum(torch.where(rollout_is_weights == 0, 0.0, w))
        power = (row_sum(rollout_is_weights) / tokens).square() * a_squared * kept.clamp(min=0)
    n = advantages.shape[0]
    metrics: Metrics = {
        "variance_proxy/proxy2_total_power": Mean(power.sum(), n),
        "variance_proxy/expected_a_squared": Mean(a_squared.sum(), n),
        "variance_proxy/expected_w": Mean(scaled.sum(), n),
    }
    if gradient_norm is not None:
        metrics["variance_proxy/proxy1_signal_strength"] = Mean(gradient_norm**2, 1)
        if n > 1:
            noise = ((power.mean() - gradient_norm**2) / (n - 1)).clamp(min=0)
            metrics["variance_proxy/proxy3_pure_noise"] = Mean(noise, 1)
    return metrics


def agreement_metrics(
    training_log_probs: Float[Tensor, "b t"], rollout_log_probs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Metrics:
    """Do the trainer and the rollout engine, on the same weights, see the same policy? `training/rollout_*`.

    `rollout_probs_diff_{mean,max,std}` are of |p_train - p_rollout| per response token, `rollout_logprob_diff_*` of the
    log-probs; `rollout_actor_probs_pearson_corr` is 1 in full agreement; `rollout_probs_diff_valid` counts the tokens.
    """
    mask = mask.bool()
    a, b = training_log_probs[mask].double(), rollout_log_probs[mask].double()
    n = float(a.numel())
    if not n:
        return {}
    p, q = a.exp(), b.exp()
    diff, log_diff = (p - q).abs(), (a - b).abs()
    return {
        "training/rollout_probs_diff_valid": Sum(n),
        "training/rollout_probs_diff_mean": Mean(diff.sum(), n),
        "training/rollout_probs_diff_max": Max(diff.max()),
        "training/rollout_probs_diff_std": Std.of(diff),
        "training/rollout_logprob_diff_mean": Mean(log_diff.sum(), n),
        "training/rollout_logprob_diff_max": Max(log_diff.max()),
        "training/rollout_actor_probs_pearson_corr": Correlation.of(p, q),
    }


def staleness_metrics(weight_versions: Sequence[Sequence[int]], current_version: int) -> Metrics:
    """How old the weights were that sampled each trajectory: `training/off_policy/trajectory_*`.

    `weight_versions[i]` are the versions of trajectory i's tokens, `current_version` the one about to be trained (0
    staleness = on-policy). `spans` counts the versions between a trajectory's first and last, `staleness` is the age of
    its newest token, `staleness_worst` of its oldest. Trajectories without tokens do not count.
    """
    sampled = [(min(versions), max(versions)) for versions in weight_versions if versions]
    if not sampled:
        return {}
    low, high = torch.tensor(sampled, dtype=torch.float64).unbind(-1)
    name = "training/off_policy/trajectory"
    return (
        stats(f"{name}_spans", high - low + 1)
        | stats(f"{name}_staleness", current_version - high)
        | stats(f"{name}_staleness_worst", current_version - low)
    )


def eviction_metrics(staleness: Sequence[int]) -> Metrics:
    """Groups dropped because they were too old, and how old: `training/off_policy/evicted_*`, under verl's names."""
    name = "training/off_policy/evicted_samples"
    return {name: Sum(len(staleness))} | stats(f"{name}_staleness", torch.tensor(staleness, dtype=torch.float64))


def spec_decode_metrics(
    drafted: Sequence[int] | None, accepted: Sequence[int] | None, verify_steps: Sequence[int] | None
) -> Metrics:
    """Speculative decoding per request: `rollout/spec_accept_rate`, `rollout/spec_accept_length` (tokens per step).

    All three absent: no speculation, no metrics. Only some present: ValueError, because the engine lost part of them.
    A request without drafts counts with rate 0, one without verify steps with length 0.
    """
    given = {"drafted": drafted, "accepted": accepted, "verify_steps": verify_steps}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3:
        return {}
    if drafted is None or accepted is None or verify_steps is None:
        raise ValueError(f"speculative decoding reports need all of {', '.join(given)}; missing: {', '.join(missing)}")
    if not len(drafted) == len(accepted) == len(verify_steps):
        raise ValueError(f"speculative decoding reports differ in length: {[len(v or ()) for v in given.values()]}")
    if not len(drafted):
        return {}
    rates = [a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)]
    lengths = [1 + a / v if v else 0.0 for a, v in zip(accepted, verify_steps, strict=True)]
    return {
        "rollout/spec_accept_rate": Mean(sum(rates), len(rates)),
        "rollout/spec_accept_length": Mean(sum(lengths), len(lengths)),
    }
