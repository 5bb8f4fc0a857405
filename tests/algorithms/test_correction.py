"""Rollout correction: oracle numbers, the side of the ratio on which each threshold acts, and errors."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from megatron_dapo.algorithms import (
    ROLLOUT_CORRECTION_PRESETS,
    RolloutCorrectionConfig,
    aggregate_loss,
    correct_rollout,
    rollout_correction,
    rollout_correction_preset,
)
from megatron_dapo.algorithms.correction import REJECTION_OPTIONS
from megatron_dapo.algorithms.correction.correct import RolloutCorrection
from megatron_dapo.metrics import compute, measured, reduce
from tests.algorithms.cases import MASK, OLD, ROLLOUT, Batch, batches, given, padded
from tests.algorithms.verl_numbers import NUMBERS, given_input

PREFIX = "rollout_corr/"


def told(found: RolloutCorrection) -> dict[str, float]:
    return compute(measured(found.metrics))


def oracle(**settings: Any) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    found = rollout_correction(OLD, ROLLOUT, MASK, **settings)
    return found.weights, found.mask, {key.removeprefix(PREFIX): value for key, value in told(found).items()}


def test_diagnostics_oracle() -> None:
    weights, mask, metrics = oracle()
    assert weights is None and torch.equal(mask, MASK)
    expected = {
        "training_ppl": 2.85547,
        "rollout_ppl": 2.35548,
        "kl": 0.272222,
        "k3_kl": 0.185914,
        "log_ppl_diff": 0.273611,
        "log_ppl_abs_diff": 0.384722,
        "log_ppl_diff_max": 0.5,
        "log_ppl_diff_min": -0.166667,
        "ppl_ratio": 1.37448,
        "chi2_token": 0.00637448,
        "chi2_seq": -0.042047,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "rows", "metrics"),
    [
        (
            {"rollout_is": "token"},
            [[1.10517, 0.904837, 1.64872, 0], [1, 0.367879, 0, 0], [0.904837, 1.05127, 0.135335, 1.10517]],
            {"rollout_is_mean": 0.913692, "rollout_is_std": 0.414177, "rollout_is_eff_sample_size": 0.829544, "rollout_is_ratio_fraction_low": 0.2222, "rollout_is_seq_mean": 0.90089, "rollout_is_seq_std": 0.281939},
        ),
        (
            {"rollout_is": "sequence"},
            [[1.64872] * 3 + [0], [0.367879] * 2 + [0, 0], [0.142274] * 4],
            {"rollout_is_mean": 0.694558, "rollout_is_eff_sample_size": 0.510398},
        ),
        (
            {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
            [[2.29108] * 3 + [0], [0.51121] * 2 + [0, 0], [0.197706] * 4],
            {"rollout_is_batch_norm_factor": 0.719625, "rollout_is_mean": 0.694558},
        ),
        (
            {"rollout_is": "token", "rollout_is_batch_normalize": True},
            [[1.20957, 0.99031, 1.80446, 0], [1.09446, 0.40263, 0, 0], [0.99031, 1.15058, 0.148119, 1.20957]],
            {},
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.5_1.5"},
            [[1.10517, 0.904837, 0, 0], [1, 0, 0, 0], [0.904837, 1.05127, 0, 1.10517]],
            {"rollout_is_oob_ratio": 3 / 9},
        ),
        ({"rollout_is": "sequence", "rollout_is_threshold": "0.5_2"}, [[1.64872] * 3 + [0], [0] * 4, [0] * 4], {}),
    ],
)  # fmt: skip
def test_weights_oracle(settings: dict[str, Any], rows: list[list[float]], metrics: dict[str, float]) -> None:
    weights, mask, found = oracle(**settings)
    assert torch.allclose(weights, torch.tensor(rows), rtol=1e-4, atol=1e-6)
    assert torch.equal(mask, MASK)
    assert {key: found[key] for key in metrics} == pytest.approx(metrics, abs=3e-5)


@pytest.mark.parametrize(
    ("option", "threshold", "dropped"),
    [
        ("token_k1", "0.5_2.0", [(1, 1), (2, 2)]),
        ("token_k2", 0.1, [(1, 1), (2, 2), (0, 2)]),
        ("token_k3", 0.1, [(1, 1), (2, 2), (0, 2)]),
        ("seq_sum_k1", "0.5_2.0", [1, 2]),
        ("seq_mean_k1", "0.8_1.25", [1, 2]),
        ("seq_mean_k2", 0.2, [1, 2]),
        ("seq_max_k2", 0.3, [1, 2]),
        ("seq_max_k3", 0.3, [1, 2]),
        ("seq_sum_k2", 0.5, [2]),
        ("seq_sum_k3", 0.5, [2]),
        ("seq_mean_k3", 0.2, [2]),
    ],
)
def test_rejection_oracle(option: str, threshold: float | str, dropped: list) -> None:
    """Which tokens (row, position), or which rows, each rule drops."""
    expected = MASK.clone()
    for place in dropped:
        expected[place] = False
    _, mask, metrics = oracle(rollout_rs=option, rollout_rs_threshold=threshold)
    assert torch.equal(mask, expected)
    lost = (MASK & ~mask).sum().item() / 9
    assert (
        metrics["rollout_rs_masked_fraction"] == metrics[f"rollout_rs_{option}_masked_fraction"] == pytest.approx(lost)
    )


@pytest.mark.parametrize("case", range(len(NUMBERS["rollout_correction"])))
def test_verl_numbers(case: int) -> None:
    """Weights, mask and every metric of 20 settings; k1 thresholds are read as verl reads them."""
    expected = NUMBERS["rollout_correction"][case]
    found = rollout_correction(
        given_input("old_logprob"),
        given_input("rollout_logprob"),
        given_input("mask"),
        rollout_rs_reference_k1=True,
        **expected["settings"],
    )
    assert torch.equal(found.mask, torch.tensor(expected["mask"]).bool())
    if expected["weights"] is None:
        assert found.weights is None
    else:
        assert torch.allclose(found.weights, torch.tensor(expected["weights"]), atol=1e-5)
    assert told(found) == pytest.approx(expected["metrics"], rel=1e-4, abs=2e-5)


# ---- on which side of r = π_old / π_rollout a threshold acts


def kept_ratios(ratios: list[float], **settings: Any) -> list[float]:
    """Ratios of one-token sequences that survive rejection."""
    logs = torch.tensor(ratios, dtype=torch.float64).log()[:, None]
    mask = torch.ones(len(ratios), 1).bool()
    kept = rollout_correction(logs - 3.0, torch.full_like(logs, -3.0), mask, **settings).mask.flatten()
    return [ratio for ratio, keep in zip(ratios, kept.tolist(), strict=True) if keep]


@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean"])
def test_k1_thresholds_bound_the_ratio_itself(level: str) -> None:
    ratios = [0.1, 0.3, 0.5, 0.9, 1.1, 1.3, 2.0, 5.0]
    rule = {"rollout_rs": f"{level}_k1"}
    assert kept_ratios(ratios, **rule, rollout_rs_threshold="0.4_1.2") == [0.5, 0.9, 1.1]
    assert kept_ratios(ratios, **rule, rollout_rs_threshold=1.2) == [0.9, 1.1]
    verl = kept_ratios(ratios, **rule, rollout_rs_threshold="0.4_1.2", rollout_rs_reference_k1=True)
    assert verl == [0.9, 1.1, 1.3, 2.0]  # 1/r in [0.4, 1.2]


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean", "seq_max"])
def test_k2_and_k3_act_on_both_sides(level: str, kind: str) -> None:
    kept = kept_ratios([0.2, 0.8, 1.0, 1.2, 5.0], rollout_rs=f"{level}_{kind}", rollout_rs_threshold=0.1)
    assert kept == [0.8, 1.0, 1.2]


def test_weights_truncate_above_or_zero_on_both_sides() -> None:
    ratios = torch.tensor([[0.1, 0.9, 1.5, 6.0]])
    mask, rollout = torch.ones(1, 4).bool(), torch.full((1, 4), -8.0)

    def weights(threshold: float | str) -> list[float]:
        found = rollout_correction(
            rollout + ratios.log(), rollout, mask, rollout_is="token", rollout_is_threshold=threshold
        )
        return found.weights[0].tolist()

    assert weights(2.0) == pytest.approx([0.1, 0.9, 1.5, 2.0], rel=1e-5)
    assert weights("0.5_5.0") == pytest.approx([0, 0.9, 1.5, 0], rel=1e-5)


def test_icepop_statistics() -> None:
    ratios = torch.tensor([[0.4, 0.8, 6.0]])
    found = rollout_correction(
        ratios.log() - 9, torch.full((1, 3), -9.0), torch.ones(1, 3), rollout_is="token", rollout_is_threshold="0.5_5.0"
    )
    expected = {"rollout_is_oob_ratio": 2 / 3, "rollout_is_std": 0.3771236, "rollout_is_eff_sample_size": 1 / 3}
    assert {key: told(found)[PREFIX + key] for key in expected} == pytest.approx(expected, rel=1e-4)
    assert found.mask.all()


def test_rules_are_combined() -> None:
    both = kept_ratios([0.3, 0.9, 1.6], rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="0.5_2.0,0.05")
    assert both == [0.9]


# ---- ranks, denominators


def test_batch_normalisation_spans_ranks() -> None:
    """Two ranks that share sums get the weights of the undivided batch; an empty rank takes part."""
    nothing = torch.zeros_like(MASK[:1])
    for level in ("token", "sequence"):
        settings = {"rollout_is": level, "rollout_is_batch_normalize": True}
        whole = rollout_correction(OLD, ROLLOUT, MASK, **settings).weights
        cuts = [slice(0, 1), slice(1, 3)]
        parts: list[Tensor] = []

        def collect(x: Tensor, into: list[Tensor] = parts) -> Tensor:
            into.append(x)
            return x

        for cut in cuts:
            rollout_correction(OLD[cut], ROLLOUT[cut], MASK[cut], **settings, all_reduce=collect)
        rollout_correction(OLD[:1], ROLLOUT[:1], nothing, **settings, all_reduce=collect)
        total = torch.stack(parts).sum(0)
        assert len(parts) == 3
        found = [
            rollout_correction(OLD[cut], ROLLOUT[cut], MASK[cut], **settings, all_reduce=lambda _, t=total: t).weights
            for cut in cuts
        ]
        assert torch.allclose(torch.cat(found), whole)


def test_rejected_tokens_count_in_denominators_or_not() -> None:
    """Both are a choice of the caller's mask and counts; weights do not depend on rejection."""
    found = rollout_correction(
        OLD, ROLLOUT, MASK, rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0"
    )
    loss = torch.ones(3, 4)
    counting = aggregate_loss(loss, found.mask, "token-mean", global_tokens=int(MASK.sum()))
    remaining = aggregate_loss(loss, found.mask, "token-mean", global_tokens=int(found.mask.sum()))
    assert (counting.item(), remaining.item()) == pytest.approx((7 / 9, 1.0))
    assert torch.equal(found.weights, rollout_correction(OLD, ROLLOUT, MASK, rollout_is="token").weights)
    with pytest.raises(ValueError, match="count_rejected=False cannot be combined with bypass_mode"):
        rollout_correction_preset("bypass_ppo_clip", count_rejected=False)


# ---- properties

SETTINGS = st.builds(
    lambda level, threshold, normalize, option: {
        "rollout_is": level,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": normalize,
        "rollout_rs": option,
        "rollout_rs_threshold": "0.7_1.4" if option and option.endswith("k1") else 0.15,
    },
    st.sampled_from([None, "token", "sequence"]),
    st.sampled_from([1.5, "0.5_2.0"]),
    st.booleans(),
    st.sampled_from([None, *REJECTION_OPTIONS]),
)


@given(batches(), SETTINGS)
def test_padding_order_and_gradients(batch: Batch, settings: dict[str, Any]) -> None:
    old, rollout = batch.logprob.requires_grad_(), batch.old_logprob
    expected = rollout_correction(old, rollout, batch.mask, **settings)
    order = torch.randperm(len(batch.mask), generator=batch.generator)
    shuffled = rollout_correction(old[order], rollout[order], batch.mask[order], **settings)
    dirty = [padded(torch.where(batch.mask, x.detach(), float("nan")), 2) for x in (old, rollout)]
    wide = rollout_correction(*dirty, padded(batch.mask, 2), **settings)
    assert torch.equal(wide.mask[:, :-2], expected.mask) and torch.equal(shuffled.mask, expected.mask[order])
    assert not wide.mask[:, -2:].any() and not (expected.mask & ~batch.mask).any()
    assert told(wide) == pytest.approx(told(expected), abs=1e-9) and told(shuffled) == pytest.approx(
        told(expected), abs=1e-9
    )
    assert all(math.isfinite(value) for value in told(expected).values())
    if expected.weights is not None:
        assert torch.allclose(wide.weights[:, :-2], expected.weights) and torch.allclose(
            shuffled.weights, expected.weights[order]
        )
        assert not expected.weights.requires_grad and (expected.weights[~batch.mask] == 0).all()
        if not settings["rollout_is_batch_normalize"]:
            assert expected.weights.max() <= 2.0


@given(batches(), st.sampled_from(["token", "sequence"]))
def test_equal_policies_need_no_correction(batch: Batch, level: str) -> None:
    found = rollout_correction(
        batch.logprob,
        batch.logprob,
        batch.mask,
        rollout_is=level,
        rollout_rs="token_k2,seq_mean_k1",
        rollout_rs_threshold=1.0001,
    )
    assert torch.equal(found.weights, batch.mask.double()) and torch.equal(found.mask, batch.mask)
    assert told(found)[PREFIX + "kl"] == told(found)[PREFIX + "chi2_seq"] == 0
    assert told(found)[PREFIX + "ppl_ratio"] == 1


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rows", [(2, 1), (1, 1, 1)], ids=str)
def test_metrics_of_micro_batches_are_those_of_the_whole(level: str, rows: tuple[int, ...]) -> None:
    """Extremes, deviations and the effective sample size are no means of those of the parts."""
    settings = {"rollout_is": level, "rollout_is_threshold": "0.5_2.0"}
    settings |= {"rollout_rs": "token_k1,seq_mean_k3,seq_max_k2", "rollout_rs_threshold": "0.8_1.3,0.1,0.2"}
    parts = zip(*(tensor.split(rows) for tensor in (OLD, ROLLOUT, MASK)), strict=True)
    merged = compute(reduce(measured(rollout_correction(*part, **settings).metrics) for part in parts))
    assert merged == pytest.approx(told(rollout_correction(OLD, ROLLOUT, MASK, **settings)), rel=1e-5, abs=1e-7)
    assert len(merged) > 50


def test_no_valid_token_at_all() -> None:
    nothing = torch.zeros_like(MASK)
    found = rollout_correction(
        OLD, ROLLOUT, nothing, rollout_is="sequence", rollout_rs="token_k1", rollout_rs_threshold=2
    )
    assert not found.mask.any() and (found.weights == 0).all() and told(found) == {}


def test_extreme_gaps_stay_finite() -> None:
    old, rollout = torch.tensor([[-1e-3, -900.0]]), torch.tensor([[-900.0, -1e-3]])
    found = rollout_correction(
        old, rollout, torch.ones(1, 2), rollout_is="token", rollout_rs="seq_max_k3", rollout_rs_threshold=1.0
    )
    assert all(math.isfinite(value) for key, value in told(found).items() if "ppl" not in key)
    assert found.weights.tolist() == [[2.0, pytest.approx(math.exp(-20))]] and not found.mask.any()


# ---- presets and errors


@pytest.mark.parametrize("name", ROLLOUT_CORRECTION_PRESETS)
def test_presets_run(name: str) -> None:
    preset = rollout_correction_preset(name)
    found = correct_rollout(preset, OLD, ROLLOUT, MASK)
    assert (found.weights is None) == (preset.rollout_is is None)
    assert preset.bypass_mode == name.startswith("bypass_")
    assert (preset.loss_type == "reinforce") == name.startswith("bypass_pg")
    assert torch.equal(found.mask, MASK) or preset.rollout_rs is not None


def test_presets_by_name() -> None:
    assert len(ROLLOUT_CORRECTION_PRESETS) == 19
    assert rollout_correction_preset("disabled") == RolloutCorrectionConfig()
    assert rollout_correction_preset("decoupled_seq_is_rs", rollout_is_threshold=5.0) == RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_threshold=5.0, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"
    )
    assert rollout_correction_preset("bypass_pg_geo_rs_token_tis") == RolloutCorrectionConfig(
        rollout_is="token",
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.999_1.001",
        bypass_mode=True,
        loss_type="reinforce",
    )
    with pytest.raises(ValueError, match=r"decoupled_tis.*decoupled_token_is"):
        rollout_correction_preset("decoupled_tis")


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"rollout_is": "word"}, ValueError, "invalid rollout_is 'word'"),
        ({"rollout_is": "token", "rollout_is_threshold": True}, TypeError, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": None}, TypeError, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, ValueError, "upper bound must be positive"),
        ({"rollout_is": "token", "rollout_is_threshold": "-1_2"}, ValueError, "lower bound must be positive"),
        ({"rollout_is": "token", "rollout_is_threshold": "3_2"}, ValueError, "exceeds the upper"),
        ({"rollout_is": "token", "rollout_is_threshold": ""}, ValueError, "must be a number"),
        ({"rollout_is": "token", "rollout_is_threshold": "a_2"}, ValueError, "must be a number, got 'a'"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, ValueError, r"\['token_k4'\]"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1}, ValueError, "seq_max_k1"),
        ({"rollout_rs": ",", "rollout_rs_threshold": 1}, ValueError, "invalid rollout_rs"),
        ({"rollout_rs": "token_k1"}, ValueError, "needs rollout_rs_threshold"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": True}, TypeError, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, ValueError, "single upper bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_0.5"}, ValueError, "exceeds the upper"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "-1"}, ValueError, "positive"),
        (
            {"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,1"},
            ValueError,
            "2 entries; give 1 or 3",
        ),
    ],
)
def test_errors_name_the_thing(settings: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        rollout_correction(OLD, ROLLOUT, MASK, **settings)
    with pytest.raises(error, match=named):
        RolloutCorrectionConfig(**settings)


def test_shapes_and_loss_type() -> None:
    with pytest.raises(ValueError, match=r"one shape.*\(3, 4\), \(3, 3\)"):
        rollout_correction(OLD, ROLLOUT[:, :3], MASK)
    with pytest.raises(ValueError, match="loss_type 'pg'"):
        RolloutCorrectionConfig(loss_type="pg")
