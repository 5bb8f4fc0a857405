"""Find the final answer in a response: `Answer:` lines and boxed values, the last one wins. Linear in the response."""

import re

from megatron_dapo.rewards.latex import last_boxed
from megatron_dapo.rewards.verdict import INVALID

LONGEST_ANSWER = 2000  # characters; anything longer is not a final answer

# "Answer:", "**Answer**:", "answer is:" -- the marker, then the rest of its line
_MARKER = re.compile(r"\banswer\b[*_\s]{0,8}(?:is\b[*_\s]{0,8})?[:\uff1a]", re.IGNORECASE)
_DECORATION = " \t\r\n*_`>#"
_OPENERS = ("$$", "\\[", "\\(", "$", "```", "\\begin{equation}", "\\begin{equation*}", "\\begin{align*}")


def final_answer(response: str) -> str:
    """The text of the last answer given, still as written, or INVALID."""
    boxed = last_boxed(response)
    line = _last_line(response, boxed[0] if boxed else -1)
    if line:
        return line
    return boxed[1].strip() if boxed and len(boxed[1]) <= LONGEST_ANSWER else INVALID


def _last_line(response: str, after: int) -> str:
    """The value of the last `Answer:` line whose value does not end before the position `after` of the last box."""
    for marker in reversed(list(_MARKER.finditer(response))[-8:]):
        start = marker.end()
        value, end = _value(response, start)
        if value:
            return value if end > after else ""
    return ""


def _value(response: str, start: int) -> tuple[str, int]:
    """What follows a marker, up to the end of its line, or of the first line with content if that one has none."""
    for _ in range(4):
        end = response.find("\n", start)
        end = len(response) if end < 0 else end
        value = response[start : min(end, start + LONGEST_ANSWER + 1)].strip(_DECORATION)
        if value and value not in _OPENERS:
            return (value, end) if len(value) <= LONGEST_ANSWER else ("", end)
        if end == len(response):
            break
        start = end + 1
    return "", start
