"""Grade-school problems: the number after `####`, or else the last answer or number in the response."""

import re
from collections import deque
from fractions import Fraction
from functools import lru_cache

from megatron_dapo.rewards.extract import final_answer
from megatron_dapo.rewards.math_robust import clean
from megatron_dapo.rewards.numbers import parse_number
from megatron_dapo.rewards.verdict import INVALID, Verdict, binary

TAIL = 256  # characters looked at first for the last number: most responses end with it

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
# A line that starts with `A:`. No \s: it crosses lines, and a response of empty lines would take quadratic time.
_A_LINE = re.compile(r"\n[ \t]*A[ \t]*:")


def verify(solution: str, ground_truth: str, *, strict: bool = False) -> Verdict:
    """Score 1 or 0. `strict` takes only `#### <number>`, compared as text, as the reference does."""
    if strict:
        match = re.search(r"#### (-?[0-9.,]+)", solution)
        prediction = match[1].replace(",", "") if match else INVALID
        return binary(prediction == ground_truth, prediction)
    prediction = _prediction(solution)
    value = parse_number(prediction)
    return binary(value is not None and value == _truth(ground_truth), prediction)


@lru_cache(maxsize=65_536)
def _truth(ground_truth: str) -> Fraction | None:
    return parse_number(clean(ground_truth))


def _prediction(solution: str) -> str:
    marked = _marked(solution)
    answer = final_answer(solution) if marked is None else marked
    number = (_last_number(answer) if answer != INVALID else None) or _last_number(solution)
    return INVALID if number is None else number.replace(",", "").replace("$", "")


def _marked(solution: str) -> str | None:
    """The rest of the last line with a marker: after an `A:` that it starts with, or else after its first `####`."""
    start, line = -1, 0
    if (last := solution.rfind("####")) >= 0:
        line = solution.rfind("\n", 0, last) + 1
        start = solution.find("####", line) + 4
    for match in _A_LINE.finditer("\n" + solution, line):
        start = match.end() - 1  # positions are one too high
    if start < 0:
        return None
    end = solution.find("\n", start)
    return solution[start:] if end < 0 else solution[start:end]


def _last_number(text: str) -> str | None:
    """The last number as written; one that starts where the tail does may be the rest of a longer one."""
    for part in (text[-TAIL:], text):
        found = deque(_NUMBER.finditer(part), maxlen=1)
        if found and (found[0].start() > 2 or part is text):
            return found[0][0]
    return None
