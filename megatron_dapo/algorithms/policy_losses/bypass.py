"""Bypass: no pass for π_old at all. The rollout log-probs stand in for it, and the gap is corrected inside the loss."""

from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.correction import correct_rollout
from megatron_dapo.algorithms.measured import Measured
from megatron_dapo.algorithms.policy_losses.base import PolicyLossConfig, register_policy_loss
from megatron_dapo.algorithms.policy_losses.reinforce import reinforce
from megatron_dapo.algorithms.policy_losses.vanilla import vanilla

BYPASS_NAMES = ("bypass_mode", "bypass")


@register_policy_loss(*BYPASS_NAMES)
def bypass(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    config: PolicyLossConfig,
    *,
    rollout_is_weights: Float[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t"], dict[str, Measured]]:
    """The loss of `rollout_correction.loss_type`, corrected from the rollout policy to the current one.

    `old_logprob` are the rollout log-probs. "ppo_clip": the vanilla loss, whose clipped ratio π/π_rollout is the
    correction. "reinforce": -A·log π times the importance weights of `rollout_is` (1 without). Rejected tokens have
    loss 0; they still count in denominators. Metrics: those of the loss over the tokens that remain, `rollout_corr/*`.
    Raises ValueError without `rollout_correction`, or when weights are passed in that would correct a second time.
    """
    correction = config.rollout_correction
    if correction is None:
        raise ValueError("policy loss 'bypass_mode' needs rollout_correction, for instance preset 'bypass_ppo_clip'")
    if rollout_is_weights is not None:
        raise ValueError("policy loss 'bypass_mode' computes its own weights; rollout_is_weights must be None")
    corrected = correct_rollout(correction, logprob.detach(), old_logprob, mask)
    if correction.loss_type == "ppo_clip":
        loss, metrics = vanilla(logprob, old_logprob, advantages, corrected.mask, config)
    else:
        weights = corrected.weights
        loss, metrics = reinforce(logprob, old_logprob, advantages, corrected.mask, config, rollout_is_weights=weights)
    remaining = {
        name: Measured("mean", loss.new_full(mask.shape, mean), corrected.mask)
        for name, mean in metrics.items()
        if isinstance(mean, float)
    }
    return loss, remaining | corrected.metrics


def effective_loss_mode(loss_mode: str, config: PolicyLossConfig) -> str:
    """The loss that a run really uses: "bypass_mode" whenever the rollout correction says so, else `loss_mode`.

    Whoever computes the loss asks here, so that setting bypass mode cannot end in another loss. ValueError when bypass
    mode meets a loss of another kind, or when "bypass_mode" is named without the rollout correction being set to it.
    """
    correction = config.rollout_correction
    wanted = correction is not None and correction.bypass_mode
    if wanted and loss_mode not in (*BYPASS_NAMES, "vanilla"):
        raise ValueError(
            f"rollout_correction.bypass_mode replaces the policy loss, but loss_mode is {loss_mode!r}; choose one"
        )
    if not wanted and loss_mode in BYPASS_NAMES:
        raise ValueError(
            "policy_loss.loss_mode 'bypass_mode' needs rollout_correction.bypass_mode, which makes the rollout "
            "log-probs stand in for π_old; choose a preset such as 'bypass_ppo_clip'"
        )
    return "bypass_mode" if wanted else loss_mode
