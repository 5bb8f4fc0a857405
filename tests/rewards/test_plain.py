"""Multiple choice, exact text and JSON."""

import json

import pytest

from megatron_dapo.rewards import UnknownDataSource, compute_score
from megatron_dapo.rewards.plain import choice, exact, json_match

CHOICES = [
    ("Answer: B", "B", True),
    ("Answer: b", "B", True),
    ("Answer: (B)", "B", True),
    ("Answer: B.", "B", True),
    ("Answer: B) Paris", "B", True),
    ("Answer: B. Paris", "(B)", True),
    ("Answer: **B**", "B", True),
    ("Answer: $\\text{(B)}$", "B", True),
    ("\\boxed{B}", "B", True),
    ("\\boxed{\\textbf{(B)}}", "B", True),
    ("I choose option B", "B", True),
    ("The correct choice is (B)", "B", True),
    ("Answer: A\nAnswer: B", "B", True),
    ("Answer: A", "B", False),
    ("Answer: Berlin", "B", False),
    ("Answer: A or B", "B", False),
    ("B", "B", False),
    ("", "B", False),
]
EXACT = [
    ("Answer: Paris", "Paris", True),
    ("Answer:  paris ", "Paris", True),
    ("Paris", "paris", True),
    ("New  York\n", "New York", True),
    ("Answer: London", "Paris", False),
    ("", "Paris", False),
]
JSON = [
    ('{"a": 1}', '{"a":1}', True),
    ('Sure:\n```json\n{"b": [1, 2], "a": null}\n```', '{"a": null, "b": [1, 2]}', True),
    ('It is {"a": {"b": "}"}}.', '{"a": {"b": "}"}}', True),
    ('[1, 2.0]', "[1, 2]", True),
    ('{"a": 0} then {"a": 1}', '{"a": 1}', True),
    ('{"a": "\\\\\\""}', '{"a": "\\\\\\""}', True),
    ('{"a": true}', '{"a": 1}', False),
    ('[2, 1]', "[1, 2]", False),
    ('{"a": 1, "b": 2}', '{"a": 1}', False),
    ('{"a": }', '{"a": 1}', False),
    ("nothing", '{"a": 1}', False),
    ("", '{"a": 1}', False),
    ("}" * 1000, '{"a": 1}', False),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "right"), CHOICES)
def test_choice(response, truth, right):
    assert choice(response, truth).acc is right


@pytest.mark.parametrize(("response", "truth", "right"), EXACT)
def test_exact(response, truth, right):
    assert exact(response, truth).acc is right


@pytest.mark.parametrize(("response", "truth", "right"), JSON)
def test_json(response, truth, right):
    assert json_match(response, truth).acc is right


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "]" * 100_000, '"' * 1_000_000 + "}", "\\" * 1_000_000 + '"}', "```" * 300_000]
)
def test_hostile_json_is_wrong_in_linear_time(text):
    assert json_match(text, "[]").acc is False


@pytest.mark.parametrize(
    ("source", "response", "truth", "extra", "score"),
    [
        ("multiple_choice", "Answer: B", "B", {}, 1.0),
        ("mmlu_pro", "Answer: B", "B", {}, 1.0),
        ("exact", "Answer: Paris", "Paris", {}, 1.0),
        ("regex", "the year 1969", r"\b19\d\d\b", {}, 1.0),
        ("regex", "the year 2069", r"\b19\d\d\b", {}, 0.0),
        ("json", '{"a":1}', '{"a": 1}', {}, 1.0),
        ("gsm8k", "#### 18", "18", {}, 1.0),
        ("openai/gsm8k", "#### 17", "18", {}, 0.0),
        ("anything", "Answer: B", "B", {"verifier": "choice"}, 1.0),
        ("math_dapo", "Paris", "paris", {"verifier": "exact"}, 1.0),
    ],
)
def test_the_source_picks_the_verifier(source, response, truth, extra, score):
    assert compute_score(source, response, truth, extra)["score"] == score


def test_an_unknown_source_is_an_error_that_says_what_to_do():
    with pytest.raises(UnknownDataSource, match=r"'codeforces'.*reward\.custom_function\.path"):
        compute_score("codeforces", "x", "y")
    with pytest.raises(NotImplementedError):
        compute_score("math_dapo", "x", "y", {"verifier": "nonesuch"})


def test_results_are_json():
    json.dumps(compute_score("math_dapo", "Answer: 5", "5"))
