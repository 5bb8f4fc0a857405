"""Rollout correction: what to do about the engine that samples not being exactly the policy that trains."""

from megatron_dapo.algorithms.correction.config import (
    ROLLOUT_CORRECTION_PRESETS,
    RolloutCorrectionConfig,
    rollout_correction_preset,
)
from megatron_dapo.algorithms.correction.correct import RolloutCorrection, correct_rollout, rollout_correction
from megatron_dapo.algorithms.correction.thresholds import REJECTION_OPTIONS

__all__ = [
    "REJECTION_OPTIONS",
    "ROLLOUT_CORRECTION_PRESETS",
    "RolloutCorrection",
    "RolloutCorrectionConfig",
    "correct_rollout",
    "rollout_correction",
    "rollout_correction_preset",
]
