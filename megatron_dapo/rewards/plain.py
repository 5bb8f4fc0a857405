"""Verifiers without mathematics: multiple choice, exact text, JSON."""

import json
import re

from megatron_dapo.rewards.extract import final_answer
from megatron_dapo.rewards.verdict import INVALID, Verdict, binary

LARGEST_JSON = 200_000  # characters

_LETTER = re.compile(r"[(\[{]?\s*([A-Za-z])\s*[)\]}]?(?:[.:)\s]|$)")
_CHOICE_LINE = re.compile(r"\b(?:option|choice)\s*(?:is\s*)?[:\s]\s*\(?([A-Z])\b", re.IGNORECASE)
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
_WRAPPING = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}")


def choice(solution: str, ground_truth: str) -> Verdict:
    """Multiple choice: the letter of the final answer, as `B`, `(B)`, `B. Paris`, `\\text{(B)}`."""
    answer = final_answer(solution)
    if answer == INVALID:
        named = _CHOICE_LINE.findall(solution[-2000:])
        answer = named[-1] if named else INVALID
    if answer == INVALID:
        return binary(False, INVALID)
    letter = _letter(answer)
    return binary(letter != INVALID and letter == _letter(ground_truth), letter)


def _letter(text: str) -> str:
    match = _LETTER.match(_WRAPPING.sub(r"\1", text).replace("*", "").replace("$", "").strip())
    return match[1].upper() if match else INVALID


def exact(solution: str, ground_truth: str) -> Verdict:
    """The final answer, or the whole response when it names none, equals the truth up to case and spacing."""
    answer = final_answer(solution)
    said = " ".join((solution if answer == INVALID else answer).split())
    return binary(said.casefold() == " ".join(ground_truth.split()).casefold(), said[:200])


def json_match(solution: str, ground_truth: str) -> Verdict:
    """The last JSON value in the response equals the truth: same keys and values, order of keys and spacing aside."""
    found = _last_json(solution)
    if found is None:
        return binary(False, INVALID)
    try:
        return binary(_same(json.loads(found), json.loads(ground_truth)), found[:200])
    except (ValueError, RecursionError):
        return binary(False, found[:200])


def _last_json(solution: str) -> str | None:
    fenced = _FENCE.findall(solution)
    if fenced:
        return fenced[-1].strip()
    text = solution.strip()
    if text[-1:] not in ("}", "]"):
        end = max(text.rfind("}"), text.rfind("]"))
        text = text[: end + 1]
    if not text or len(text) > LARGEST_JSON:
        text = text[-LARGEST_JSON:]
    start = _opening(text)
    return None if start is None else text[start:]


def _opening(text: str) -> int | None:
    """Where the bracket that the last character closes was opened; quotes are respected."""
    depth, quoted = 0, False
    for index in range(len(text) - 1, -1, -1):
        char = text[index]
        if char == '"' and not _escaped(text, index):
            quoted = not quoted
        elif not quoted:
            depth += (char in "}]") - (char in "{[")
            if depth == 0:
                return index
    return None


def _escaped(text: str, index: int) -> bool:
    """Whether the character at `index` follows an odd number of backslashes."""
    before = index
    while before and text[before - 1] == "\\":
        before -= 1
    return (index - before) % 2 == 1


def _same(a: object, b: object) -> bool:
    """Equality of JSON values in which true is not 1 and 1 equals 1.0."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b
