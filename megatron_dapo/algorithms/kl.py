"""KL to a reference policy: per-token estimators, the penalty inside the reward, the loss term, and the coefficient."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.masked import floats, real, row_means, valid

KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
_K3_LOG_BOUND = 20.0
_K3_BOUND = 10.0


def kl_penalty(logprob: Float[Tensor, "b t"], ref_logprob: Float[Tensor, "b t"], kind: str) -> Float[Tensor, "b t"]:
    """Estimate KL(π ‖ π_ref) at each sampled token, with d = log π - log π_ref. No mask is applied.

    - kl, k1: d;  abs: |d|;  mse, k2: d²/2
    - low_var_kl, k3: e^-d + d - 1, held at 10. Where it is held, d < -2.61 or d > 11, the gradient is 0: just where the
      policy has gone far away.
    - a trailing "+", as in k3+: the value of the named estimator with the gradient of k2, which is that of the true KL
      in expectation and is never held back. Recommended for a loss.

    Source: Schulman, "Approximating KL divergence" (2020); the straight-through form: arXiv:2506.09477, §4.
    """
    name = kind.removesuffix("+")
    if name == "full":
        raise NotImplementedError("kl kind 'full' needs the logits of the whole vocabulary; use 'k3+' or 'k1'")
    if name not in KL_KINDS:
        raise ValueError(f"unknown kl kind {kind!r}; it must be one of {list(KL_KINDS)}, optionally followed by '+'")
    difference = real(logprob) - real(ref_logprob)
    value = _forward(difference, name)
    if not kind.endswith("+"):
        return value
    half_square = 0.5 * difference.square()
    return half_square - half_square.detach() + value.detach()


def _forward(difference: Float[Tensor, "b t"], name: str) -> Float[Tensor, "b t"]:
    if name in ("kl", "k1"):
        return difference
    if name == "abs":
        return difference.abs()
    if name in ("mse", "k2"):
        return 0.5 * difference.square()
    back = (-difference).clamp(-_K3_LOG_BOUND, _K3_LOG_BOUND)
    return (back.exp() - back - 1).clamp(max=_K3_BOUND)


def kl_loss(
    logprob: Float[Tensor, "b t"], ref_logprob: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], kind: str
) -> Float[Tensor, "b t"]:
    """The KL term of an actor loss: `kl_penalty`, 0 in padding; aggregate it like the policy loss."""
    mask = mask.bool()
    return valid(kl_penalty(valid(logprob, mask), valid(ref_logprob, mask), kind), mask)


def kl_in_reward(
    token_scores: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    ref_logprob: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    coef: float,
    kind: str = "kl",
) -> tuple[Float[Tensor, "b t"], dict[str, float]]:
    """token_scores - coef·KL at each valid token (RLHF, arXiv:2203.02155, eq. 2).

    Metrics: `actor/reward_kl_penalty`, the mean over rows of the row's mean KL per token (feed it to the controller
    after the step), and `actor/reward_kl_penalty_coeff`, the coefficient used here.
    """
    with torch.no_grad():
        penalty = kl_loss(old_logprob, ref_logprob, mask, kind)
        current = row_means(penalty, mask.bool()).mean() if len(penalty) else penalty.sum()
        metrics = floats({"actor/reward_kl_penalty": current}) | {"actor/reward_kl_penalty_coeff": float(coef)}
        return real(token_scores) - coef * penalty, metrics


class FixedKLController:
    """A coefficient that stays."""

    def __init__(self, value: float):
        self.value = value

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to learn from the KL."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    """A coefficient that steers the KL to `target` (arXiv:1909.08593, §2.2): larger while the KL is above it."""

    def __init__(self, value: float, target: float, horizon: float):
        if horizon <= 0 or target <= 0:
            raise ValueError(f"adaptive kl_ctrl needs target_kl and horizon above 0, got {target} and {horizon}")
        super().__init__(value)
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """value ← value·(1 + clip(KL/target - 1, ±0.2)·n_steps/horizon), with n_steps the samples seen."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def kl_controller(
    kind: str = "fixed", *, kl_coef: float = 0.001, target_kl: float = 0.1, horizon: float = 10000
) -> FixedKLController:
    """The controller of `algorithm.kl_ctrl`: "fixed" or "adaptive"."""
    if kind == "fixed":
        return FixedKLController(kl_coef)
    if kind == "adaptive":
        return AdaptiveKLController(kl_coef, target_kl, horizon)
    raise ValueError(f"unknown kl_ctrl type {kind!r}; it must be 'fixed' or 'adaptive'")
