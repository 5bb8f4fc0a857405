"""Groups, rewards, verifiers and pushes: small cases by hand."""

import pytest

from megatron_dapo.metrics import (
    compute,
    group_metrics,
    merge,
    push_metrics,
    reward_metrics,
    source_metrics,
    verifier_metrics,
)


def test_groups_by_signal():
    got = compute(group_metrics([1, 1, 0, 0, 1, 0], ["a", "a", "b", "b", "c", "c"]))
    third = pytest.approx(1 / 3)
    assert got == {
        "group/all_correct_ratio": third,
        "group/all_wrong_ratio": third,
        "group/mixed_ratio": third,
        "group/acc_std": pytest.approx(0.5 / 3),
    }
    assert compute(group_metrics([], [])) == {}


def test_rewards():
    got = compute(reward_metrics([0.5, 1.0], [1.0, 1.0], [1.0, 0.0]))
    assert got["reward/shaped/mean"] == 0.75 and got["reward/raw/max"] == 1.0 and got["reward/acc/mean"] == 0.5
    assert got["reward/shaping/mean"] == -0.25
    assert compute(reward_metrics([], [], [])) == {}


def test_verifiers_and_sources():
    got = compute(merge(verifier_metrics({"timeouts": 1}, [0.1, 0.3]), verifier_metrics({"timeouts": 2})))
    assert got["verifier/count/timeouts"] == 3 and got["verifier/seconds/mean"] == pytest.approx(0.2)
    assert "reward/failed_ratio" not in got  # nothing was scored
    some = merge(verifier_metrics({"scored": 6, "failed": 1}), verifier_metrics({"scored": 2, "failed": 1}))
    assert compute(some)["reward/failed_ratio"] == 0.25
    by_source = compute(source_metrics(["openai/gsm8k", "aime", "aime"], [1, 0, 1]))
    assert by_source["source/aime/acc"] == 0.5 and by_source["source/openai/gsm8k/trajectories"] == 1


def test_push():
    fine = push_metrics(0.5, 2_000_000_000, received=2_040_000_000, stored=2_000_000_000)
    got = compute(merge(fine, push_metrics(1.0, 1_000_000_000, received=2_000_000_000, stored=2_000_000_000)))
    assert got == {
        "push/seconds": 1.5,
        "push/seconds_max": 1.0,
        "push/bytes": 3e9,
        "push/bytes_received": 4.04e9,
        "push/ratio_to_bound": 1.01,
        "push/gigabytes_per_s": 2.0,
    }
