"""Find the parts of a LaTeX answer in linear time: balanced braces, boxed values."""

import re

MOST_BOXES = 16  # openings looked at from the end; boxes that never close cannot make the search quadratic
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def closing_brace(text: str, opening: int, *, escapes: bool = True) -> int:
    r"""Index of the brace that closes the one at `opening`, or -1. With `escapes`, `\{` and `\}` are ordinary text."""
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
    r"""Position and content of the last complete `\boxed{...}` or `\fbox{...}`; None when there is none."""
    end = len(text)
    for _ in range(MOST_BOXES):
        word = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
        if word < 0:
            return None
        brace = word + (6 if text.startswith("\\boxed", word) else 5)
        while brace < len(text) and brace < word + 16 and text[brace].isspace():
            brace += 1
        if text.startswith("{", brace) and (close := closing_brace(text, brace)) >= 0:
            return word, text[brace + 1 : close]
        end = word
    return None
