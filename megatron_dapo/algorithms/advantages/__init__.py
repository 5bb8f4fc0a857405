"""Advantage estimators by name; importing this package registers them all."""

from megatron_dapo.algorithms.advantages import (  # noqa: F401  (each import registers estimators)
    gae,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    remax,
    rloo,
)
from megatron_dapo.algorithms.advantages.base import (
    AdvantageConfig,
    Estimator,
    advantage,
    advantage_names,
    check_inputs,
    register_advantage,
)

__all__ = ["AdvantageConfig", "Estimator", "advantage", "advantage_names", "check_inputs", "register_advantage"]
