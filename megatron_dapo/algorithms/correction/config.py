"""What a run may set about rollout correction, and the presets with names."""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_dapo.algorithms.correction.thresholds import parse_rejection, parse_weight_threshold


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Settings of the correction for the gap between trainer and rollout engine; checked when constructed.

    rollout_is, rollout_is_threshold, rollout_is_batch_normalize: importance weights, see `weights`.
    rollout_rs, rollout_rs_threshold: rejection, see `thresholds`.
    rollout_rs_reference_k1: read k1 thresholds as bounds of 1/r, as verl does.
    bypass_mode: the rollout log-probs serve as π_old, and the loss "bypass_mode" corrects against the current policy.
    loss_type: in bypass mode, "ppo_clip" (the clipped ratio π/π_rollout corrects; weights are not used) or "reinforce".
    count_rejected: whether rejected tokens and sequences still count in the denominators of the loss. True keeps the
        denominators of the step fixed, so rejecting shrinks the step; False averages over what remains. In bypass mode
        what remains is known only once all micro-batches have been computed, so there it must be True.
    """

    rollout_is: Literal["token", "sequence"] | None = None
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None
    rollout_rs_reference_k1: bool = False
    bypass_mode: bool = False
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    count_rejected: bool = True

    def __post_init__(self) -> None:
        if self.rollout_is not in (None, "token", "sequence"):
            raise ValueError(f"invalid rollout_is {self.rollout_is!r}; it must be 'token', 'sequence' or None")
        if self.loss_type not in ("ppo_clip", "reinforce"):
            raise ValueError(f"invalid rollout_correction.loss_type {self.loss_type!r}; use 'ppo_clip' or 'reinforce'")
        parse_weight_threshold(self.rollout_is_threshold)
        if self.rollout_rs is not None:
            parse_rejection(self.rollout_rs, self.rollout_rs_threshold)
        if self.bypass_mode and not self.count_rejected:
            raise ValueError(
                "count_rejected=False cannot be combined with bypass_mode: which tokens remain is known only after the "
                "forward pass of each micro-batch, the denominator of the step before it; use a decoupled preset"
            )


_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_TOKEN = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_PG = {"bypass_mode": True, "loss_type": "reinforce"}

_PRESETS: dict[str, dict] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQ,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": _SEQ | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": _GEO | _SEQ,
    "decoupled_geo_rs_token_tis": _GEO | _TOKEN,
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": _K3 | _SEQ,
    "decoupled_k3_rs_token_tis": _K3 | _TOKEN,
    "bypass_ppo_clip": _CLIP,
    "bypass_ppo_clip_geo_rs": _CLIP | _GEO,
    "bypass_ppo_clip_k3_rs": _CLIP | _K3,
    "bypass_pg_is": _PG | _SEQ,
    "bypass_pg_token_icepop": _PG | _ICEPOP,
    "bypass_pg_geo_rs": _PG | _GEO,
    "bypass_pg_geo_rs_seq_tis": _PG | _GEO | _SEQ,
    "bypass_pg_geo_rs_token_tis": _PG | _GEO | _TOKEN,
}
ROLLOUT_CORRECTION_PRESETS: tuple[str, ...] = tuple(_PRESETS)


def rollout_correction_preset(name: str, **overrides: object) -> RolloutCorrectionConfig:
    """The named preset; keyword arguments override its fields."""
    if name not in _PRESETS:
        raise ValueError(f"unknown rollout correction preset {name!r}; there are {list(_PRESETS)}")
    return replace(RolloutCorrectionConfig(), **(_PRESETS[name] | overrides))
