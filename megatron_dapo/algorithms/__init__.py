"""What DAPO is made of, as pure functions of tensors: no processes, no files, no configuration beyond a few numbers."""

from megatron_dapo.algorithms.advantages import (
    AdvantageConfig,
    advantage,
    advantage_names,
    check_inputs,
    register_advantage,
)
from megatron_dapo.algorithms.aggregation import AGGREGATION_MODES, aggregate_loss
from megatron_dapo.algorithms.correction import (
    ROLLOUT_CORRECTION_PRESETS,
    RolloutCorrection,
    RolloutCorrectionConfig,
    correct_rollout,
    rollout_correction,
    rollout_correction_preset,
)
from megatron_dapo.algorithms.dynamic_sampling import DynamicSampler, GenerationLimitReached
from megatron_dapo.algorithms.filtering import FILTER_METRICS, filter_value, group_filter
from megatron_dapo.algorithms.kl import KL_KINDS, kl_controller, kl_in_reward, kl_loss, kl_penalty
from megatron_dapo.algorithms.overlong import overlong_penalty
from megatron_dapo.algorithms.policy_losses import (
    PolicyLossConfig,
    effective_loss_mode,
    policy_loss,
    policy_loss_names,
    register_policy_loss,
)
from megatron_dapo.algorithms.value import value_loss

__all__ = [
    "AGGREGATION_MODES",
    "FILTER_METRICS",
    "KL_KINDS",
    "ROLLOUT_CORRECTION_PRESETS",
    "AdvantageConfig",
    "DynamicSampler",
    "GenerationLimitReached",
    "PolicyLossConfig",
    "RolloutCorrection",
    "RolloutCorrectionConfig",
    "advantage",
    "advantage_names",
    "aggregate_loss",
    "check_inputs",
    "correct_rollout",
    "effective_loss_mode",
    "filter_value",
    "group_filter",
    "kl_controller",
    "kl_in_reward",
    "kl_loss",
    "kl_penalty",
    "overlong_penalty",
    "policy_loss",
    "policy_loss_names",
    "register_advantage",
    "register_policy_loss",
    "rollout_correction",
    "rollout_correction_preset",
    "value_loss",
]
