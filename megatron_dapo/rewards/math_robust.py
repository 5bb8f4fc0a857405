r"""The default verifier of math answers: reads what a careful person would read, and asks algebra only when it must.

An answer is taken from the last `Answer:` line or `\boxed{}`; text decoration, units, thousands separators, leading
zeros and a trailing period do not matter; numbers are compared exactly. What this cannot decide (`\sqrt{8}` against
`2\sqrt{2}`) is left to `symbolic`, which the reward manager runs under a deadline in a process of its own.
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from megatron_dapo.rewards.extract import LONGEST_ANSWER, final_answer
from megatron_dapo.rewards.latex import closing_brace
from megatron_dapo.rewards.numbers import parse_number
from megatron_dapo.rewards.verdict import INVALID, Verdict, signed


@dataclass(frozen=True)
class Undecided:
    """The quick rules cannot tell whether `prediction` equals `truth`: both look like formulas."""

    prediction: str
    truth: str


# Characters that mean the same as an ASCII or LaTeX spelling, as "character spelling" pairs.
_SPELLINGS = r"""
− -   – -   ‐ -   ‑ -   ﹣ -   × \times_   · \cdot_   ⋅ \cdot_   ÷ /   ⁄ /   ∕ /   π \pi_   ∞ \infty_   ° ^\circ_
≤ \le_   ≥ \ge_   √ \sqrt   ∪ \cup_   ⁰ ^{0}   ¹ ^{1}   ² ^{2}   ³ ^{3}   ⁴ ^{4}   ⁵ ^{5}
½ \frac{1}{2}   ¼ \frac{1}{4}   ¾ \frac{3}{4}   ⅓ \frac{1}{3}   ⅔ \frac{2}{3}
， ,   。 .   ＝ =   ′ '   ‘ '   ’ '   “ "   ” "
"""
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"
_TRANSLATED = str.maketrans(
    {old: new.replace("_", " ") for old, new in zip(*[iter(_SPELLINGS.split())] * 2, strict=True)}
    | dict.fromkeys(_INVISIBLE, "")
)

_SPACING = re.compile(r"\\(?:[,;:!> ]|(?:quad|qquad|displaystyle|textstyle|left|right|[bB]igg?[lr]?)(?![a-zA-Z]))|~")
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|boxed|fbox|mbox|operatorname|bm|boldsymbol)\s?\{"
)
_WORDS = re.compile(r"(?<=[\d}])\s*([A-Za-z]{1,20}\.?(?:[ /][A-Za-z]{1,20}\.?){0,2})(?:\^\{?[23]\}?)?$")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?P<mark>,|\{,\}|\\,|\\!|,\\!| )\d{3})(?:(?P=mark)\d{3})*(?![\d,])")
_SHORT_FRAC = re.compile(r"\\[dtc]?frac\s*(\d|\{[^{}]*\})\s*(\d|\{[^{}]*\})")
_SHORT_SQRT = re.compile(r"\\sqrt\s*(\d|[A-Za-z])")
_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
_DELIMITERS = re.compile(r"\\?\$|\\[()\[\]]")
_ASSIGNMENT = re.compile(
    r"\s*(?:[A-Za-z]|\\[a-z]{2,8})(?:_\{?\w{1,4}\}?)?(?:\([A-Za-z,\s]{1,8}\))?\s*(?:=|\\approx|:=)\s*"
)

_UNIT_WORDS = """
unit units square sq cubic degree degrees deg radian radians rad percent dollar dollars usd cent cents euro euros pound
pounds mm cm dm km m in inch inches ft foot feet yd yard yards mi mile miles meter meters metre metres kilometer
kilometers centimeter centimeters g kg mg gram grams kilogram kilograms lb lbs oz ounce ounces liter liters litre
litres ml l s sec secs second seconds min mins minute minutes h hr hrs hour hours day days week weeks month months year
years mph kph kmh per way ways point points digit digits integer integers solution solutions value values number
numbers student students people person persons item items time times edge edges side sides meal meals multiple multiples
"""
_UNITS = frozenset(_UNIT_WORDS.split())
_COMMANDS = "frac sqrt pi binom log ln sin cos tan infty cup cap pm begin le ge in circ times cdot overline emptyset"
_MATH_WORDS = re.compile(rf"\\(?:{'|'.join(_COMMANDS.split())})")


def verify(solution: str, ground_truth: str) -> Verdict | Undecided:
    """Score 1 or -1, or Undecided when only algebra can tell."""
    raw = final_answer(solution)
    if raw == INVALID:
        return signed(False, INVALID)
    prediction = clean(raw)
    truth, number = _truth(ground_truth)
    if not prediction:
        return signed(False, INVALID)
    if prediction == truth:
        return signed(True, prediction)
    value = parse_number(prediction)
    if value is not None and number is not None:
        return signed(value == number, prediction)
    if _is_formula(prediction) and _is_formula(truth):
        return Undecided(prediction, truth)
    return signed(False, prediction)


@lru_cache(maxsize=65_536)
def _truth(ground_truth: str) -> tuple[str, object]:
    text = clean(ground_truth)
    return text, parse_number(text)


def clean(answer: str) -> str:
    """The canonical text of one answer: no decoration, no units, no separators, no leading zeros."""
    if len(answer) > LONGEST_ANSWER:
        return ""
    text = answer.strip()
    if not text.isdigit() or not text.isascii():
        text = _plain(text)
    return _ZEROS.sub("", text)


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text.translate(_TRANSLATED))
    text = text.replace("**", "").replace("__", "").replace("`", "")
    text = _unwrap(text)
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _SPACING.sub(" ", text).replace("{,}", ",")
    text = _DELIMITERS.sub("", text)
    text = text.strip(" \t\r\n\"'")
    text = text.rstrip(".,;:! ") if not text.endswith("...") else text
    text = _ASSIGNMENT.sub("", text, count=1) if _ASSIGNMENT.match(text) else text
    text = _without_unit(text)
    text = text.replace("\\%", "").rstrip("%").replace("^\\circ", "").replace("^{\\circ}", "")
    text = _SHORT_SQRT.sub(r"\\sqrt{\1}", text)
    text = _SHORT_FRAC.sub(lambda match: f"\\frac{{{match[1].strip('{}')}}}{{{match[2].strip('{}')}}}", text)
    return re.sub(r"\s+", "", text)


def _unwrap(text: str) -> str:
    r"""Replace `\text{...}`, `\boxed{...}` and the like by their content, with a space so that words stay apart."""
    for _ in range(16):
        match = _WRAPPER.search(text)
        if match is None:
            return text
        end = closing_brace(text, match.end() - 1)
        if end < 0:
            return text[: match.start()] + " " + text[match.end() :]
        text = f"{text[: match.start()]} {text[match.end() : end].strip()} {text[end + 1 :]}"
    return text


def _without_unit(text: str) -> str:
    """Drop known units after a number. Any other word may change the value (million, half, or), so it stays."""
    match = _WORDS.search(text)
    if match is None:
        return text
    words = [word.strip(".").lower() for word in re.split(r"[ /]", match[1])]
    if all(word in _UNITS for word in words):
        return text[: match.start()]
    return text


def _is_formula(text: str) -> bool:
    """Whether algebra could say something about `text`: it has digits, operators or mathematical commands."""
    if len(text) > 400:
        return False
    return bool(_MATH_WORDS.search(text) or re.search(r"\d", text) or re.fullmatch(r"[A-Za-z][-+*/^()A-Za-z]*", text))
