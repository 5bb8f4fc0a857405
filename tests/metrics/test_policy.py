"""Policy metrics against the reference's own numbers and small cases by hand."""

import pytest
import torch

from megatron_dapo.metrics import (
    agreement_metrics,
    compute,
    eviction_metrics,
    merge,
    reduce,
    spec_decode_metrics,
    staleness_metrics,
    variance_proxy_metrics,
)

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
OLD = torch.tensor([[-1, -0.5, -2, -9], [-0.3, -1.2, -9, -9], [-0.7, -0.1, -3, -0.9]])
ADVANTAGES = torch.tensor([[1, 1, 1, 0], [-1.5, -1.5, 0, 0], [0.5, 0.5, -2, 0.5]])
WEIGHTS = torch.tensor([[1.2, 0.5, 2, 0], [1, 0.3, 0, 0], [0.8, 1.1, 0, 1]])


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (None, (0.49, 1.206966, 0.358483, 1.088542, 1.526975)),
        (WEIGHTS, (0.49, 1.232665, 0.371332, 1.088542, 1.954078)),
    ],
)
def test_variance_proxy_equals_the_reference(weights, expected):
    got = compute(
        variance_proxy_metrics(
            torch.full_like(OLD, 0.4), OLD, ADVANTAGES, MASK, gradient_norm=0.7, rollout_is_weights=weights
        )
    )
    names = ("proxy1_signal_strength", "proxy2_total_power", "proxy3_pure_noise", "expected_a_squared", "expected_w")
    assert tuple(got[f"variance_proxy/{name}"] for name in names) == pytest.approx(expected, abs=1e-6)


def test_variance_proxy_without_gradient_norm_or_with_one_row_leaves_the_noise_out():
    assert "variance_proxy/proxy3_pure_noise" not in variance_proxy_metrics(OLD, OLD, ADVANTAGES, MASK)
    one = variance_proxy_metrics(OLD[:1], OLD[:1], ADVANTAGES[:1], MASK[:1], gradient_norm=1.0)
    assert "variance_proxy/proxy3_pure_noise" not in one and compute(one)["variance_proxy/proxy1_signal_strength"] == 1
    assert variance_proxy_metrics(OLD[:0], OLD[:0], ADVANTAGES[:0], MASK[:0]) == {}


def test_variance_proxy_ignores_what_stands_in_the_padding():
    dirty = torch.where(MASK, OLD, torch.nan)
    a = compute(variance_proxy_metrics(torch.full_like(OLD, 0.4), OLD, ADVANTAGES, MASK))
    b = compute(variance_proxy_metrics(torch.where(MASK, 0.4, torch.nan), dirty, ADVANTAGES, MASK))
    assert a == b


def test_agreement():
    same = compute(agreement_metrics(OLD, OLD, MASK))
    assert same["training/rollout_probs_diff_max"] == 0.0 and same["training/rollout_probs_diff_valid"] == 9.0
    assert same["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    shifted = OLD.clone()
    shifted[0, 0] -= 0.25
    shifted[0, 3] = 77.0  # padding
    got = compute(agreement_metrics(OLD, shifted, MASK))
    assert got["training/rollout_logprob_diff_max"] == pytest.approx(0.25)
    assert got["training/rollout_logprob_diff_mean"] == pytest.approx(0.25 / 9)
    p = OLD[MASK].exp()
    q = shifted[MASK].exp()
    assert got["training/rollout_probs_diff_std"] == pytest.approx(float((p - q).abs().std(correction=0)))
    corr = float(torch.corrcoef(torch.stack([p, q]))[0, 1])
    assert got["training/rollout_actor_probs_pearson_corr"] == pytest.approx(corr)
    assert agreement_metrics(OLD, OLD, torch.zeros_like(MASK)) == {}


def test_agreement_of_micro_batches_is_that_of_the_whole():
    """Neither a standard deviation nor a correlation is the mean of those of the parts."""
    rollout = OLD * torch.tensor([[1.0], [1.3], [0.6]])
    parts = [agreement_metrics(OLD[i : i + 1], rollout[i : i + 1], MASK[i : i + 1]) for i in range(3)]
    assert compute(reduce(parts)) == pytest.approx(compute(agreement_metrics(OLD, rollout, MASK)))


def test_staleness():
    got = compute(staleness_metrics([[3, 3, 4], [5], [], [2, 5]], current_version=5))
    name = "training/off_policy/trajectory"
    assert got[f"{name}_spans/mean"] == pytest.approx((2 + 1 + 4) / 3) and got[f"{name}_spans/max"] == 4
    assert got[f"{name}_staleness/max"] == 1 and got[f"{name}_staleness/min"] == 0
    assert got[f"{name}_staleness_worst/max"] == 3 and got[f"{name}_staleness_worst/mean"] == pytest.approx(5 / 3)
    assert staleness_metrics([[], []], 5) == {}


def test_evictions_merge_by_count():
    merged = compute(merge(eviction_metrics([4]), eviction_metrics([6, 6, 6])))
    assert merged["training/off_policy/evicted_samples"] == 4
    assert merged["training/off_policy/evicted_samples_staleness/mean"] == pytest.approx(5.5)
    assert compute(eviction_metrics([])) == {"training/off_policy/evicted_samples": 0.0}


def test_speculative_decoding_is_published_only_when_everything_is_there():
    got = compute(spec_decode_metrics([4, 0, 2], [3, 0, 0], [1, 0, 2]))
    assert got == {
        "rollout/spec_accept_rate": pytest.approx(0.25),
        "rollout/spec_accept_length": pytest.approx((4 + 0 + 1) / 3),
    }
    assert spec_decode_metrics(None, None, None) == {} and spec_decode_metrics([], [], []) == {}
    with pytest.raises(ValueError, match="missing: accepted, verify_steps"):
        spec_decode_metrics([1], None, None)
    with pytest.raises(ValueError, match="differ in length"):
        spec_decode_metrics([1], [1, 2], [1])
