"""Grade-school problems: the number after `####`, or else the last answer or number in the response."""

import re

from megatron_dapo.rewards.extract import final_answer
from megatron_dapo.rewards.math_robust import clean
from megatron_dapo.rewards.numbers import parse_number
from megatron_dapo.rewards.verdict import INVALID, Verdict, binary

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
# no \s at a line's start: it crosses lines, and a response of empty lines would take quadratic time
_MARKED = re.compile(r"(?:####|^[ \t]*A[ \t]*:)[ \t]*([^\n]*)", re.MULTILINE)


def verify(solution: str, ground_truth: str, *, strict: bool = False) -> Verdict:
    """Score 1 or 0. `strict` takes only `#### <number>`, compared as text, as the reference does."""
    if strict:
        match = re.search(r"#### (-?[0-9.,]+)", solution)
        prediction = match[1].replace(",", "") if match else INVALID
        return binary(prediction == ground_truth, prediction)
    prediction = _prediction(solution)
    value, truth = parse_number(clean(prediction)), parse_number(clean(ground_truth))
    return binary(value is not None and value == truth, prediction)


def _prediction(solution: str) -> str:
    marked = _MARKED.findall(solution)
    candidates = [marked[-1]] if marked else [final_answer(solution)]
    for text in (*candidates, solution):
        numbers = _NUMBER.findall(text) if text != INVALID else []
        if numbers:
            return numbers[-1].replace(",", "").replace("$", "")
    return INVALID
