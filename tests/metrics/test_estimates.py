"""What an evaluation claims: pass@k and maj@k equal the enumeration of all subsets, intervals cover what they should."""

import itertools

import numpy as np
import pytest

from megatron_dapo.metrics.estimates import Samples, bootstrap_interval, estimates, majority_at, pass_at


@pytest.mark.parametrize("right", [0, 1, 3, 6])
@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(right: int, k: int):
    flags = [1] * right + [0] * (6 - right)
    assert pass_at(6, right, k) == pytest.approx(np.mean([any(s) for s in itertools.combinations(flags, k)]))


def test_pass_at_k_stays_finite_for_many_samples():
    assert 0 < pass_at(10_000, 1, 5000) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@3 of 2"):
        pass_at(2, 1, 3)


def enumerated_majority(samples: Samples, k: int) -> float:
    worth = dict(zip(samples.said, samples.right, strict=True))
    values = []
    for chosen in itertools.combinations(samples.said, k):
        votes = [said for said in chosen if said is not None]
        most = max((votes.count(v) for v in votes), default=0)
        winners = {v for v in votes if votes.count(v) == most}
        values.append(np.mean([worth[v] for v in winners]) if winners else 0.0)
    return float(np.mean(values))


PROBLEM = Samples((1, 1, 0, 0, 0, 0), ("7", "7", "8", "9", None, None))


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_majority_is_the_mean_over_subsets(k: int):
    got = majority_at(PROBLEM, k, np.random.default_rng(0))
    assert got == pytest.approx(enumerated_majority(PROBLEM, k), abs=1e-12 if k == 6 else 0.08)


def test_ties_share_and_silence_is_wrong():
    rng = np.random.default_rng(0)
    assert majority_at(Samples((1, 0), ("a", "b")), 2, rng) == 0.5
    assert majority_at(Samples((1, 1), (None, None)), 2, rng) == 0.0
    assert majority_at(Samples((0, 0, 1), ("b", None, "a")), 3, rng) == 0.5


def test_names_and_values_of_a_small_set():
    problems = [Samples((1, 0, 0, 1), ("5", "6", "6", "5")), Samples((0,) * 4, ("1", "2", "3", "4"))]
    got = estimates(problems, 4)
    assert list(got) == ["avg@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"]
    assert got["avg@4"].value == got["pass@1"].value == 0.25
    assert got["pass@2"].value == pytest.approx((1 - 1 / 6) / 2) and got["pass@4"].value == 0.5
    assert got["maj@4"].value == 0.25  # a tie of right and wrong, and nothing
    assert all(e.low <= e.value <= e.high for e in got.values())
    assert estimates(problems, 4) == got and estimates([], 4) == {}
    assert list(estimates([Samples((1,), ("5",))], 1)) == ["avg@1", "pass@1"]


def test_a_sample_that_could_not_be_judged_renames_nothing():
    whole, short = Samples((1, 0, 0, 1), ("5", "6", "6", "5")), Samples((1, 0, 0), ("1", "2", "3"))
    got = estimates([whole, short], 4)
    assert list(got) == ["avg@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"]
    assert got["avg@4"].value == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert got["pass@4"].value == 1.0 and got["pass@2"].value == pytest.approx((5 / 6 + 2 / 3) / 2)
    assert got["maj@4"].value == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(100):
        values = rng.binomial(1, 0.3, (60, 1)).astype(float)
        low, high = bootstrap_interval(values, rng)
        inside += bool(low[0] <= 0.3 <= high[0])
    assert 88 <= inside <= 99


def test_global_generators_are_left_alone():
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    estimates([PROBLEM] * 3, 6)
    assert (np.random.get_state()[1] == before).all()
