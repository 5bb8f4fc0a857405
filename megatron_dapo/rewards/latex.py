"""Find the parts of a LaTeX answer in linear time: balanced braces, boxed values."""

import re

MOST_BOXES = 16  # openings looked at from the end; each may cost a search of the whole text for the other spelling
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def closing_brace(text: str, opening: int, *, end: int | None = None, escapes: bool = True) -> int:
    r"""Index of the brace before `end` that closes the one at `opening`, or -1.

    With `escapes`, `\{` and `\}` are ordinary text.
    """
    end = len(text) if end is None else end
    depth = 0
    if not escapes:
        for index in range(opening, end):
            depth += (text[index] == "{") - (text[index] == "}")
            if depth == 0:
                return index
        return -1
    for match in _BRACE.finditer(text, opening, end):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return match.start()
    return -1


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Position and content of the last complete `\boxed{...}` or `\fbox{...}`; None when there is none."""
    end = unclosed = len(text)
    for _ in range(MOST_BOXES):
        word = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
        if word < 0:
            return None
        brace = word + (6 if text.startswith("\\boxed", word) else 5)
        while brace < len(text) and brace < word + 16 and text[brace].isspace():
            brace += 1
        if text.startswith("{", brace):
            if (close := closing_brace(text, brace, end=unclosed)) >= 0:
                return word, text[brace + 1 : close]
            unclosed = brace  # whatever encloses a brace that never closes cannot close behind it
        end = word
    return None
