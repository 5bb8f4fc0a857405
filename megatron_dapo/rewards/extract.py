"""Find the final answer in a response: `Answer:` lines and boxed values, the last one wins. Linear in the response."""

import re
from collections.abc import Iterator

from megatron_dapo.rewards.latex import last_boxed
from megatron_dapo.rewards.verdict import INVALID

LONGEST_ANSWER = 2000  # characters; anything longer is not a final answer
TAIL = 4096  # characters looked at first: an answer found there is the last one, and most are there
MOST_MARKERS = 8  # markers without a value that are passed over, from the end

# "Answer:", "**Answer**:", "answer is:"; \uff1a is the full-width colon
_MARKER = re.compile(r"(?<![^\W_])answer(?![^\W_])[*_\s]{0,8}(?:is\b[*_\s]{0,8})?[:\uff1a]", re.IGNORECASE)
_CONTENT = re.compile(r"[^\W_]|\\|[\u221e\u2205]")  # a letter, a digit, a command, infinity, the empty set
_DECORATION = " \t\r\n*_`>#"


def final_answer(response: str) -> str:
    """The text of the last answer given, still as written, or INVALID."""
    found = _find(response[-TAIL:])
    if not found and len(response) > TAIL:
        found = _find(response)
    return found or INVALID


def _find(response: str) -> str:
    boxed = last_boxed(response)
    line = _last_line(response, boxed[0] if boxed else -1)
    if line:
        inner = last_boxed(line)
        return inner[1].strip() if inner else line
    return boxed[1].strip() if boxed and len(boxed[1]) <= LONGEST_ANSWER else ""


def _last_line(response: str, after: int) -> str:
    """The value of the last `Answer:` line, unless it ends before the position `after` of the last box."""
    for count, start in enumerate(_markers(response)):
        if count == MOST_MARKERS:
            break
        value, end = _value(response, start)
        if value:
            return value if end > after else ""
    return ""


def _markers(response: str) -> Iterator[int]:
    """Where the values of `Answer:` markers start, last first."""
    lowered = response.lower()
    if len(lowered) != len(response):  # some capital letters become two characters, and positions would be off
        yield from (match.end() for match in reversed(list(_MARKER.finditer(response))))
        return
    position = lowered.rfind("answer")
    while position >= 0:
        if match := _MARKER.match(response, position):
            yield match.end()
        position = lowered.rfind("answer", 0, position)


def _value(response: str, start: int) -> tuple[str, int]:
    """What follows a marker: the rest of its line, or else the first line with content of the next three."""
    end = start
    for _ in range(4):
        end = response.find("\n", start)
        end = len(response) if end < 0 else end
        value = response[start : min(end, start + LONGEST_ANSWER + 1)].strip(_DECORATION)
        if _CONTENT.search(value) and not _opens_display(value):
            return (value, end) if len(value) <= LONGEST_ANSWER else ("", end)
        if end == len(response):
            break
        start = end + 1
    return "", end


def _opens_display(value: str) -> bool:
    r"""Whether a line only opens a formula that follows: `$$`, `\[`, `\begin{equation}`."""
    return value in ("\\[", "\\(") or (
        value.startswith("\\begin{") and value.endswith(("}", "}$")) and "&" not in value
    )
