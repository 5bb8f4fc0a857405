"""The published rules, held to the letter: cases from the reference, its known oddities included."""

import pytest

from megatron_dapo.rewards import compute_score
from megatron_dapo.rewards.math_strict import normalize, verify

CASES = [
    ("Answer: 540", "540", True, "540"),
    ("Answer: $\\frac{1}{2}$", "\\frac12", True, "\\frac{1}{2}"),
    ("answer : 1,000", "1000", True, "1000"),
    ("Answer: x = 12", "12", True, "12"),
    ("so \\boxed{34}", "34", True, "34"),  # fallback without an Answer line
    ("Answer: 1\nAnswer: 540", "540", True, "540"),
    ("Answer: 540\nAnswer: 1", "540", False, "1"),
    ("Answer: 12 \\text{ cm}", "12", True, "12"),
    ("Answer: 7 units", "7", True, "7"),
    ("Answer: \\$18", "18", True, "18"),
    ("Answer:\n540", "540", True, "540"),
    ("Answer: \\boxed{540}", "540", True, "540"),
    ("Answer: -7", "-7", True, "-7"),
    ("Answer: a $5$ b", "5", True, "5"),
    ("Answer: 45^\\circ", "45", True, "45"),
    ("Answer: \\sqrt3", "\\sqrt{3}", True, "\\sqrt{3}"),
    ("Answer: \\textbf{7}", "7", True, "7"),
    ("Answer: \\overline{AB}", "AB", True, "AB"),
    ("Answer: 3{,}000", "3000", True, "3000"),
    ('Answer: "7"', "7", True, "7"),
    # wrong by these rules, right by common sense
    ("Answer: 34.", "34", False, "34."),
    ("**Answer:** 540", "540", False, "**540"),
    ("Answer: 0540", "540", False, "0540"),
    ("Answer: 1/2", "\\frac{1}{2}", False, "1/2"),
    ("Answer: 540" + " " * 10 + "x" * 300, "540", False, "[INVALID]"),
    ("\\boxed{540}" + "x" * 100, "540", False, "[INVALID]"),
    ("\\boxed{1,000}", "1000", False, "1,000"),  # the fallback compares as is
    ("\\boxed{540", "540", False, "[INVALID]"),
    ("", "540", False, "[INVALID]"),
    ("Answer: ", "540", False, ""),
    ("no answer", "540", False, "[INVALID]"),
    ("Answer: [INVALID] \\boxed{5}", "5", False, "[INVALID]5"),
]


@pytest.mark.parametrize(("response", "truth", "right", "prediction"), CASES)
def test_published_rules(response, truth, right, prediction):
    verdict = verify(response, truth)
    assert (verdict.score, verdict.acc, verdict.pred) == (1.0 if right else -1.0, right, prediction)
    assert compute_score("math_dapo", response, truth, strict=True) == verdict.as_dict()


@pytest.mark.parametrize("source", ["math_dapo", "math", "math_dapo_reasoning", "aime2024", "aime"])
def test_every_math_source_uses_them_in_strict_mode(source):
    assert compute_score(source, "Answer: 34.", "34", strict=True)["acc"] is False
    assert compute_score(source, "Answer: 34.", "34")["acc"] is True


def test_only_the_text_after_the_last_equals_sign_counts():
    assert normalize("a = b = 12") == "12"


def test_commas_leave_pure_numbers_only():
    assert normalize("1,234") == "1234"
    assert normalize("1,x") == "1,x"


def test_a_megabyte_costs_no_more_than_its_tail():
    assert verify("z" * 1_000_000 + "\nAnswer: 5", "5").acc
