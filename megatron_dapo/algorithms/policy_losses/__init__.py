"""Policy losses by name; importing this package registers them all."""

from megatron_dapo.algorithms.policy_losses import vanilla as _vanilla
from megatron_dapo.algorithms.policy_losses.base import (
    PolicyLoss,
    PolicyLossConfig,
    policy_loss,
    policy_loss_names,
    register_policy_loss,
)

_REGISTERED = (_vanilla,)

__all__ = ["PolicyLoss", "PolicyLossConfig", "policy_loss", "policy_loss_names", "register_policy_loss"]
