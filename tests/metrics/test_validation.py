"""Validation numbers: exact where they can be, the same in every run, under the names dashboards know."""

import itertools

import numpy as np
import pytest

from megatron_dapo.metrics import compute, validation_metrics
from megatron_dapo.metrics.validation import best_of, majority_of


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_best_and_worst_equal_the_enumeration_of_all_draws(draws):
    values = np.array([0.0, 1.0, 1.0, 5.0])
    everything = list(itertools.product(values, repeat=draws))
    best, worst = [max(d) for d in everything], [min(d) for d in everything]
    assert best_of(values, draws) == pytest.approx((np.mean(best), np.std(best)))
    assert best_of(values, draws, largest=False) == pytest.approx((np.mean(worst), np.std(worst)))


def test_majority_is_near_the_enumeration_with_ties_to_the_first_seen():
    values, votes = np.array([1.0, 0.0, 0.0]), ["7", "8", "9"]
    outcomes = []
    for draw in itertools.product(range(3), repeat=3):
        drawn = [votes[i] for i in draw]
        winner = max(drawn, key=lambda v: (drawn.count(v), -drawn.index(v)))
        outcomes.append(values[votes.index(winner)])
    mean, std = majority_of(values, votes, 3, np.random.default_rng(0))
    assert mean == pytest.approx(np.mean(outcomes), abs=0.05) and std == pytest.approx(np.std(outcomes), abs=0.05)
    assert majority_of(np.array([1.0, 1.0, 0.0]), ["7", "7", "7"], 2, np.random.default_rng(0))[0] > 0.5


def test_names_and_values_of_a_small_pass():
    got = compute(
        validation_metrics(
            sources=["aime"] * 4 + ["gsm8k"] * 2,
            prompts=["p", "p", "q", "q", "p", "r"],
            variables={"acc": [1, 0, 1, 1, 1, 0], "reward": [1, -1, 1, 1, 1, -1]},
            predictions=["a", "b", "a", "a", "a", None],
        )
    )
    assert got["val-core/aime/acc/mean@2"] == 0.75
    assert got["val-aux/aime/acc/std@2"] == pytest.approx(0.25)
    assert got["val-core/aime/acc/best@2/mean"] == pytest.approx((0.75 + 1) / 2)
    assert got["val-aux/aime/acc/worst@2/mean"] == pytest.approx((0.25 + 1) / 2)
    assert 0.6 < got["val-core/aime/acc/maj@2/mean"] < 0.9
    assert got["val-aux/aime/reward/mean@2"] == 0.5
    assert got["val-core/gsm8k/acc/mean@1"] == 0.5 and "val-aux/gsm8k/acc/std@1" not in got


def test_only_the_largest_n_is_core_and_20_is_not_taken_for_2():
    n = 20
    names = validation_metrics(["s"] * n, ["p"] * n, {"reward": list(np.linspace(0, 1, n))}, ["x"] * n)
    core = {name for name in names if name.startswith("val-core/")}
    assert core == {
        "val-core/s/reward/mean@20",
        *(f"val-core/s/reward/{kind}@20/{part}" for kind in ("best", "maj") for part in ("mean", "std")),
    }
    assert {f"val-aux/s/reward/best@{k}/mean" for k in (2, 4, 8, 16)} <= set(names)


def test_a_sample_that_could_not_be_scored_renames_nothing_and_is_counted():
    """Two prompts of four samples: one keeps three, the other none; and a source of one sample loses one of its two."""
    got = compute(
        validation_metrics(
            sources=["s"] * 8 + ["t"] * 2,
            prompts=list("ppppqqqqpq"),
            variables={"acc": [1, 1, 0, 0, 0, 0, 0, 0, 1, 0]},
            predictions=["a"] * 10,
            scored=[True, True, True, False] + [False] * 4 + [True, False],
        )
    )
    assert got["val-core/s/acc/mean@4"] == pytest.approx(2 / 3)
    assert got["val-core/s/acc/best@4/mean"] == pytest.approx(1 - (1 / 3) ** 4)
    assert (got["val-aux/s/unscored"], got["val-aux/t/unscored"]) == (5, 1)
    assert got["val-core/t/acc/mean@1"] == 1.0
    assert not any("@3" in name for name in got)


def test_a_source_of_which_nothing_could_be_scored_has_only_the_count():
    assert compute(validation_metrics(["s"], ["p"], {"acc": [0]}, scored=[False])) == {"val-aux/s/unscored": 1}


def test_its_own_generator_leaves_the_global_one_alone_and_repeats():
    args = (["s"] * 8, ["p"] * 8, {"acc": [0, 1] * 4}, list("abcdabcd"))
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    assert compute(validation_metrics(*args)) == compute(validation_metrics(*args))
    assert (np.random.get_state()[1] == before).all()


def test_nothing_validated_gives_nothing():
    assert validation_metrics([], [], {"acc": []}) == {}
    with pytest.raises(ValueError, match="at least one value"):
        best_of(np.array([]), 2)
