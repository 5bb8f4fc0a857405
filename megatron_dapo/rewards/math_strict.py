r"""The published DAPO rules for math answers, kept to the letter so that published numbers can be reproduced.

The rules are those of the `math_dapo` reward: the last `Answer:` line within the last 300 characters, normalised by
the replacement tables of Minerva (Lewkowycz et al. 2022, appendix D.1), compared as strings. Known consequences, all
intended: `Answer: 34.`, `**Answer:** 540` and `Answer: 0540` are wrong. The default (`math_robust`) accepts them.
"""

import re

from megatron_dapo.rewards.latex import closing_brace
from megatron_dapo.rewards.verdict import INVALID, Verdict, signed

SOLUTION_TAIL = 300  # characters that are read at all
BOXED_TAIL = 100  # characters in which the boxed fallback is looked for

_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# Order matters: each replacement works on the result of those before it.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_UNITS = """
square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm
pounds meters meals edges students childrentickets multiples
"""
_REMOVED = (
    *_UNITS.split(),
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)
_REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),  # only the first formula of the line counts
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),  # \frac12 is \frac{1}{2}
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def normalize(answer: str) -> str:
    """The canonical form that the published rules compare."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for word in _REMOVED:
        text = text.replace(word, "")
    for pattern, new in _REWRITTEN:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def verify(solution: str, ground_truth: str) -> Verdict:
    """Score 1 or -1 by the published rules; without an `Answer:` line, a boxed value near the end may match as is."""
    tail = solution[-SOLUTION_TAIL:]
    lines = _ANSWER_LINE.findall(tail)
    prediction = normalize(lines[-1]) if lines else INVALID
    if prediction != INVALID:
        return signed(prediction == normalize(ground_truth), prediction)
    boxed = _last_boxed(tail[-BOXED_TAIL:])
    return signed(boxed == ground_truth, boxed)


def _last_boxed(text: str) -> str:
    r"""Content of the box opened by the last `\boxed{`, or INVALID when it does not close."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return INVALID
    brace = start + len("\\boxed")
    end = closing_brace(text, brace, escapes=False)
    return INVALID if end < 0 else text[brace + 1 : end]
