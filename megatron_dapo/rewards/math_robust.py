r"""The default verifier of math answers: reads what a careful person would read, and asks algebra only when it must.

An answer is taken from the last `Answer:` line or `\boxed{}`; text decoration, units, thousands separators, leading
zeros and a trailing period do not matter; numbers are compared exactly. What this cannot decide (`\sqrt{8}` against
`2\sqrt{2}`) is left to `symbolic`, which the reward manager runs under a deadline in a process of its own.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

from megatron_dapo.rewards.extract import LONGEST_ANSWER, final_answer
from megatron_dapo.rewards.latex import closing_brace
from megatron_dapo.rewards.numbers import parse_number
from megatron_dapo.rewards.verdict import INVALID, Pending, Verdict, signed

LONGEST_FORMULA = 400  # characters
SYMBOLIC_CPU_SECONDS = 2.0  # of computing per question, not of waiting: a busy machine changes no verdict

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
_WORDS = re.compile(
    r"(?:(?<=[\d})\]])|(?<=\\pi))((?:\s|\\[,;:! ]|~)*)"
    r"([A-Za-z]{1,20}\.?(?:[ /]{1,3}[A-Za-z]{1,20}\.?){0,2})\s*(?:\^\s?\{?[23]\}?)?$"
)
_GROUPED = re.compile(r"[+-]?\d{1,3}(?P<mark>,|\{,\}|\\,|\\!|,\\!| )\d{3}(?:(?P=mark)\d{3}){0,40}(?:\.\d+)?")
_SHORT_FRAC = re.compile(r"\\frac\s*(\d|\{[^{}]*\})\s*(\d|\{[^{}]*\})")
_SHORT_SQRT = re.compile(r"\\sqrt\s*(\d|[A-Za-z])")
_PLAIN_SQRT = re.compile(r"(?<![\\a-z])sqrt\s?\(([^()]{1,100})\)")
_PLAIN_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_ZEROS = re.compile(r"(?<![\d.,}])0+(?=\d)")
_DELIMITERS = re.compile(r"\\?[$\u20ac\u00a3\u00a5]|\\[()\[\]]")
_SEVERAL = re.compile(r"[,;]|\\(?:ne|le|ge|quad)|\b(?:or|and|if|when|for)\b")
_FILLER = re.compile(
    r"(?:(?:(?:the|final|answer|result|value|total|sum|is|are|equals|exactly|so|thus|therefore)\b[\s:]*)+|an?\s)"
    r"(?=[-+.\\(\[{\d])",
    re.IGNORECASE,
)
_ONE_FORMULA = re.compile(r"([^$]{0,200})\$([^$]{1,400})\$([^$]{0,200})")
_ASSIGNMENT = re.compile(
    r"\s*(?:[A-Za-z]|\\[a-z]{2,8})(?:_\w|_\{\w{1,4}\})?(?:\([A-Za-z,\s]{1,8}\))?\s*(?:=|\\approx|:=)\s*"
)

_UNIT_WORDS = """
unit units square sq cubic degree degrees deg radian radians rad percent dollar dollars usd cent cents euro euros pound
pounds mm cm dm km m in inch inches ft foot feet yd yard yards mi mile miles meter meters metre metres kilometer
kilometers centimeter centimeters g kg mg gram grams kilogram kilograms lb lbs oz ounce ounces liter liters litre
litres ml l s sec secs second seconds min mins minute minutes h hr hrs hour hours day days week weeks month months year
years mph kph kmh per way ways point points digit digits integer integers solution solutions value values number
numbers student students people person persons item items time times edge edges sides meal meals multiple multiples
st nd rd th
"""
_UNITS = frozenset(_UNIT_WORDS.split())
_CHANGING = """
hundred thousand million billion trillion dozen half halves third thirds quarter quarters
not no or and to than minus negative about approximately between
"""
_CHANGING_WORDS = frozenset(_CHANGING.split())
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+")
_SYMBOLS = re.compile(r"[A-Za-z](?:[-+*/^()A-Za-z]{0,40}[-+*/^()][-+*/^()A-Za-z]{0,40})?|[A-Za-z]{2}")


def verify(solution: str, ground_truth: str) -> Verdict | Pending:
    """Score 1 or -1, or what only algebra can tell."""
    raw = final_answer(solution)
    truth, number = _truth(ground_truth)
    prediction = "" if raw == INVALID else clean(raw, value="=" not in truth)
    if not prediction:
        return signed(False, INVALID)
    if prediction == truth:
        return signed(True, prediction)
    value = parse_number(prediction)
    if value is not None and number is not None:
        return signed(value == number, prediction)
    if _is_formula(prediction) and _is_formula(truth):
        return Pending("symbolic", (prediction, truth), prediction)
    return signed(False, prediction)


@lru_cache(maxsize=65_536)
def _truth(ground_truth: str) -> tuple[str, Fraction | None]:
    text = clean(ground_truth)
    return text, parse_number(text)


def clean(answer: str, *, value: bool = False) -> str:
    """The canonical text of one answer: no decoration, no units, no separators, no leading zeros.

    With `value` the answer is known to be no equation, so that of `2+3=5` only the 5 is kept.
    """
    if len(answer) > LONGEST_ANSWER:
        return ""
    text = answer.strip()
    if not (text.isdigit() and text.isascii()):
        text = _plain(text, value)
    return _ZEROS.sub("", text)


def _plain(text: str, value: bool) -> str:
    text = unicodedata.normalize("NFKC", text.translate(_TRANSLATED))
    text = text.replace("**", "").replace("__", "").replace("`", "")
    text = _formula_in_words(_unwrap(text))
    text = _without_quotes(_DELIMITERS.sub("", text).strip())
    if match := _FILLER.match(text):
        text = text[match.end() :]
    text = _right_side(text, value)
    text = _without_unit(text.replace("^{\\circ}", "").replace("^\\circ", ""))
    text = text.replace("\\%", "").rstrip("% ").strip()
    if _GROUPED.fullmatch(text):
        text = re.sub(r"[^\d.+-]", "", text)
    text = _SPACING.sub(" ", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _SHORT_SQRT.sub(r"\\sqrt{\1}", _PLAIN_SQRT.sub(r"\\sqrt{\1}", _PLAIN_PI.sub(r"\\pi ", text)))
    text = _SHORT_FRAC.sub(lambda match: f"\\frac{{{match[1].strip('{}')}}}{{{match[2].strip('{}')}}}", text)
    return _joined(text)


def _right_side(text: str, value: bool) -> str:
    """What `x =` or, with `value`, a chain of equalities ends in. Several statements in one answer stay as they are."""
    left, equals, right = text.rpartition("=")
    whole = left.count("{") == left.count("}")  # the sign is no part of \\sum_{k=1}
    if value and whole and equals and right.strip() and left[-1:] not in "<>!" and not _SEVERAL.search(left):
        return right.strip()
    match = _ASSIGNMENT.match(text)
    return text[match.end() :] if match else text


def _without_quotes(text: str) -> str:
    """Without closing punctuation and the pair of quotes around it; a lone quote may be a prime."""
    for _ in range(2):
        text = text if text.endswith("...") else text.rstrip(".,;: \\\t\r\n")
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
            text = text[1:-1].strip()
    return text


def _joined(text: str) -> str:
    r"""Without spaces, except those that end a command: `\pi r` must not become `\pir`."""
    return re.sub(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])|\s+", lambda match: f"{match[1]} " if match[1] else "", text)


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


def _formula_in_words(text: str) -> str:
    """The one formula of a sentence such as "the area is $12$ units", unless its words change the value."""
    match = _ONE_FORMULA.fullmatch(text)
    if match is None or re.search(r"\s.*(?<![\\A-Za-z])[A-Za-z]{3,}", match[2].strip()):
        return text
    words = re.findall(r"[a-z]+", f"{match[1]} {match[3]}".lower())
    if _CHANGING_WORDS.intersection(words) or re.search(r"\d", match[1] + match[3]):
        return text
    return match[2]


def _without_unit(text: str) -> str:
    """Drop known units after a number. Any other word may change the value (million, half, or), so it stays."""
    match = _WORDS.search(text)
    if match is None or (not match[1] and len(match[2]) == 1):  # 5m is a product, 5 m a length
        return text
    words = [word.strip(".").lower() for word in re.split(r"[ /]+", match[2])]
    return text[: match.start()] if _UNITS.issuperset(words) else text


def _is_formula(text: str) -> bool:
    """Whether algebra could say something about `text`. Words of four letters and more are prose, not formulas."""
    if len(text) > LONGEST_FORMULA:
        return False
    bare = _COMMAND.sub(" ", text)
    if re.search(r"[A-Za-z]{4,}", bare):
        return False
    return bool(re.search(r"\d", bare) or bare != text or _SYMBOLS.fullmatch(bare))
