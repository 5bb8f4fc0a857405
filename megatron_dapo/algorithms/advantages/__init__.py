"""Advantage estimators by name; importing this package registers them all."""

from megatron_dapo.algorithms.advantages import grpo as _grpo
from megatron_dapo.algorithms.advantages.base import (
    AdvantageConfig,
    Estimator,
    advantage,
    advantage_names,
    check_inputs,
    register_advantage,
)

_REGISTERED = (_grpo,)

__all__ = ["AdvantageConfig", "Estimator", "advantage", "advantage_names", "check_inputs", "register_advantage"]
