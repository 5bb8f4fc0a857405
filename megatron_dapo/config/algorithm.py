"""What is learned from a group: the section `algorithm`."""

from typing import Any, Literal

from pydantic import model_validator

from megatron_dapo.config.base import Count, Float, Fraction, Int, NonNegative, Positive, Section, Strings
from megatron_dapo.config.training import KLKind

AdvEstimator = Literal[
    "gae",
    "grpo",
    "grpo_vectorized",
    "gdpo",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "opo",
    "remax",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]
_IS_TOKEN = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_IS_SEQUENCE = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_RS_SUM = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_RS_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_RS_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_BYPASS_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_BYPASS_PG = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: dict[str, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _IS_TOKEN,
    "decoupled_seq_is": _IS_SEQUENCE,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": {**_IS_SEQUENCE, **_RS_SUM},
    "decoupled_geo_rs": _RS_GEO,
    "decoupled_geo_rs_seq_tis": {**_IS_SEQUENCE, **_RS_GEO},
    "decoupled_geo_rs_token_tis": {**_IS_TOKEN, **_RS_GEO},
    "decoupled_k3_rs": _RS_K3,
    "decoupled_k3_rs_seq_tis": {**_IS_SEQUENCE, **_RS_K3},
    "decoupled_k3_rs_token_tis": {**_IS_TOKEN, **_RS_K3},
    "bypass_ppo_clip": _BYPASS_CLIP,
    "bypass_ppo_clip_geo_rs": {**_BYPASS_CLIP, **_RS_GEO},
    "bypass_ppo_clip_k3_rs": {**_BYPASS_CLIP, **_RS_K3},
    "bypass_pg_is": {**_BYPASS_PG, **_IS_SEQUENCE},
    "bypass_pg_token_icepop": {**_BYPASS_PG, **_ICEPOP},
    "bypass_pg_geo_rs": {**_BYPASS_PG, **_RS_GEO},
    "bypass_pg_geo_rs_seq_tis": {**_BYPASS_PG, **_IS_SEQUENCE, **_RS_GEO},
    "bypass_pg_geo_rs_token_tis": {**_BYPASS_PG, **_IS_TOKEN, **_RS_GEO},
}


class KLControlConfig(Section):
    """Weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Constant, or steered towards `target_kl`."""
    kl_coef: NonNegative = 0.001
    """(Initial) weight."""
    horizon: Count = 10000
    """adaptive: samples over which the weight reacts."""
    target_kl: Positive = 0.1
    """adaptive: the KL aimed at."""


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): drop groups without a signal and draw more prompts until the batch is full."""

    enable: bool = False
    """Filter groups whose metric is the same for all members."""
    metric: str = "acc"
    """acc, score, reward, seq_reward, seq_final_reward, or a field of the reward's extra info."""
    max_num_gen_batches: Int = 0
    """Most generation batches for one training batch; <= 0: no limit."""
    on_exhausted: Literal["raise", "train_partial", "skip"] = "raise"
    """At that limit: end the run, train on what was kept, or skip the step."""
    surplus: Literal["discard", "carry"] | None = None
    """Kept groups beyond `train_batch_size`: throw away, or use in the next step; null: discard in the sync mode."""


class RolloutCorrectionConfig(Section):
    """Importance sampling and rejection against the mismatch of rollout and training policy."""

    preset: str | None = None
    """A named combination; keys set beside it win over the preset's."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Level of the importance weights; null: none."""
    rollout_is_threshold: float | str = 2.0
    """Upper truncation, or `lower_upper` (IcePop: zero outside)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their batch mean."""
    rollout_rs: str | None = None
    """Rejection rules, comma-separated: token_k1..3, seq_sum_k1..3, seq_mean_k1..3, seq_max_k2..3; null: none."""
    rollout_rs_threshold: float | str | None = None
    """One threshold for all rules or one per rule, comma-separated (k1: `lower_upper` or upper; k2, k3: upper)."""
    rollout_rs_reference_k1: bool = False
    """Read k1 thresholds as bounds of 1/ratio, as the reference does; false: of the ratio."""
    count_rejected: bool = True
    """Whether rejected tokens still count in the loss's denominators (false: average over what remains)."""
    bypass_mode: bool = False
    """Use the rollout's log-probs as the old log-probs; no old-log-prob pass."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """bypass_mode: the loss that is optimized."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, values: Any) -> Any:
        """A preset's keys become visible values, so that the resolved configuration says what is done."""
        if not isinstance(values, dict) or values.get("preset") is None:
            return values
        return {**PRESETS.get(values["preset"], {}), **values}


class AlgorithmConfig(Section):
    """Advantage, KL in reward, dynamic sampling, rollout correction."""

    adv_estimator: AdvEstimator = "grpo"
    """Advantage estimator."""
    gamma: Fraction = 1.0
    """Discount."""
    lam: Fraction = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide group advantages by the group's standard deviation (false: Dr. GRPO)."""
    singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a response that is alone in its group: 0, or its score against a baseline of 0 (the reference)."""
    count_rejected_in_baseline: bool = True
    """Whether responses that the rollout correction rejects still count in their group's statistics."""
    gdpo_reward_keys: Strings = ()
    """gdpo: the fields of the reward's extra info that are normalised each on its own."""
    gdpo_reward_weights: tuple[Float, ...] | None = None
    """gdpo: their weights; null: all 1."""
    handle_zero_tail: bool = True
    """optimal_token_baseline: no baseline where only one trajectory of the group is left."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty from the token rewards; needs the reference model."""
    kl_penalty: KLKind = "kl"
    """Its estimator."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
