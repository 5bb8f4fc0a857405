"""Find the parts of a LaTeX answer in linear time: balanced braces, boxed values."""

import re

_BOXED = re.compile(r"\\f?boxed\s{0,8}\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def closing_brace(text: str, opening: int, *, escapes: bool = True) -> int:
    """Index of the brace that closes the one at `opening`, or -1. With `escapes`, `\\{` and `\\}` are ordinary text."""
    depth = 0
    if not escapes:
        for index in range(opening, len(text)):
            depth += (text[index] == "{") - (text[index] == "}")
            if depth == 0:
                return index
        return -1
    for match in _BRACE.finditer(text, opening):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return match.start()
    return -1


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Position and content of the last complete `\boxed{...}` (or `\fbox{...}`); None when there is none.

    Boxes that never close are passed over; only the last 16 openings are looked at, which bounds the work.
    """
    openings = [(match.start(), match.end() - 1) for match in _BOXED.finditer(text)]
    for start, brace in reversed(openings[-16:]):
        end = closing_brace(text, brace)
        if end >= 0:
            return start, text[brace + 1 : end]
    return None
