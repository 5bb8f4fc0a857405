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


def test_failed_trajectories_count_only_as_failed():
    got = compute(reward_metrics([0.5, 99.0], [1.0, 99.0], [1.0, 0.0], [False, True]))
    assert got["reward/shaped/mean"] == 0.5 and got["reward/raw/max"] == 1.0 and got["reward/acc/mean"] == 1.0
    assert got["reward/shaping/mean"] == -0.5 and got["reward/failed_ratio"] == 0.5
    assert compute(reward_metrics([1.0], [1.0], [1.0], [True])) == {"reward/failed_ratio": 1.0}
    assert compute(reward_metrics([], [], [], [])) == {}


def test_verifiers_and_sources():
    got = compute(merge(verifier_metrics({"timeouts": 1}, [0.1, 0.3]), verifier_metrics({"timeouts": 2})))
    assert got["verifier/count/timeouts"] == 3 and got["verifier/seconds/mean"] == pytest.approx(0.2)
    by_source = compute(source_metrics(["openai/gsm8k", "aime", "aime"], [1, 0, 1]))
    assert by_source["source/aime/acc"] == 0.5 and by_source["source/openai/gsm8k/trajectories"] == 1


def test_push():
    fine = push_metrics(
        0.5, 2_000_000_000, received=2_040_000_000, stored=2_000_000_000, bound_seconds=0.4, checksum_ok=True
    )
    got = compute(merge(fine, push_metrics(1.0, 1_000_000_000, bound_seconds=0.6, checksum_ok=False)))
    assert got == {
        "push/seconds": 1.5,
        "push/seconds_max": 1.0,
        "push/bytes": 3e9,
        "push/bytes_received": 2.04e9,
        "push/received_over_stored": 1.02,
        "push/gigabytes_per_s": 2.0,
        "push/ratio_to_bound": 1.5,
        "push/checksum_ok": 0.0,
    }
