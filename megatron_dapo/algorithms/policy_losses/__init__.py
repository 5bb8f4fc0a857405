"""Policy losses by name; importing this package registers them all."""

from megatron_dapo.algorithms.policy_losses import (  # noqa: F401  (each import registers a loss)
    bypass,
    cispo,
    clip_cov,
    dppo,
    dro,
    geo_mean,
    gpg,
    gspo,
    kl_cov,
    reinforce,
    sapo,
    vanilla,
)
from megatron_dapo.algorithms.policy_losses.base import (
    PolicyLoss,
    PolicyLossConfig,
    policy_loss,
    policy_loss_names,
    register_policy_loss,
)
from megatron_dapo.algorithms.policy_losses.bypass import effective_loss_mode

__all__ = [
    "PolicyLoss",
    "PolicyLossConfig",
    "effective_loss_mode",
    "policy_loss",
    "policy_loss_names",
    "register_policy_loss",
]
