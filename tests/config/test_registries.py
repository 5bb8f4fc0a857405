"""The words that the configuration accepts are the words that the algorithms know: neither imports the other, so a test says it."""

from dataclasses import fields
from typing import get_args

from megatron_dapo import algorithms
from megatron_dapo.config.algorithm import PRESETS, AdvEstimator, RolloutCorrectionConfig
from megatron_dapo.config.training import KLKind, LossAggMode, LossMode, PolicyLossConfig


def test_estimators():
    ours = {name for name in algorithms.advantage_names() if not name.startswith("test_")}  # other tests register some
    assert set(get_args(AdvEstimator)) == ours


def test_policy_losses():
    chosen_by_bypass_mode = {"bypass", "bypass_mode"}
    assert set(get_args(LossMode)) == set(algorithms.policy_loss_names()) - chosen_by_bypass_mode


def test_aggregation():
    assert set(get_args(LossAggMode)) == set(algorithms.AGGREGATION_MODES)


def test_kl_kinds():
    """`full` needs the whole vocabulary and exists in the algorithms as an error only."""
    straight = set(algorithms.KL_KINDS) - {"full"}
    assert set(get_args(KLKind)) == straight | {f"{kind}+" for kind in straight}


def test_presets():
    assert set(PRESETS) == set(algorithms.ROLLOUT_CORRECTION_PRESETS)
    for name in PRESETS:
        ours, theirs = RolloutCorrectionConfig(preset=name), algorithms.rollout_correction_preset(name)
        shared = {field.name for field in fields(theirs)} & set(RolloutCorrectionConfig.model_fields)
        assert {key: getattr(ours, key) for key in shared} == {key: getattr(theirs, key) for key in shared}, name


def test_defaults_of_the_policy_losses():
    theirs = algorithms.PolicyLossConfig()
    shared = {field.name for field in fields(theirs)} & set(PolicyLossConfig.model_fields)
    assert len(shared) >= 7
    assert {key: getattr(PolicyLossConfig(), key) for key in shared} == {key: getattr(theirs, key) for key in shared}
