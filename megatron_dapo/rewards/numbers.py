"""Exact numbers from answer text: integers, decimals, fractions, percentages, powers of ten. No floating point."""

import re
from fractions import Fraction

LONGEST_NUMBER = 400  # digits; longer ones are compared as text

_INTEGER = r"\d+"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"([+-]?)({_DECIMAL})(?:[eE]([+-]?\d{{1,3}})|(?:\\times|\\cdot|\*)10\^\{{?([+-]?\d{{1,3}})\}}?)?")
_RATIO = re.compile(rf"([+-]?)({_DECIMAL})/([+-]?)({_DECIMAL})")
_FRACTION = re.compile(rf"([+-]?)(\d*)\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}}")


def parse_number(text: str) -> Fraction | None:
    r"""The value of `text` when it is a plain number, else None.

    Reads `12`, `-3.50`, `.5`, `1.2e3`, `1.2\times10^{3}`, `3/4`, `\frac{3}{4}`, `2\frac{1}{2}` (mixed). The text must
    have no spaces, units or thousands separators: `clean` in `math_robust` removes those.
    """
    if len(text) > LONGEST_NUMBER:
        return None
    if match := _NUMBER.fullmatch(text):
        sign, digits, exponent, power = match.groups()
        value = Fraction(digits) * Fraction(10) ** int(exponent or power or 0)
        return -value if sign == "-" else value
    if match := _RATIO.fullmatch(text):
        sign, top, sign_below, bottom = match.groups()
        ratio = _divide(Fraction(top), Fraction(bottom))
        return ratio if ratio is None or (sign == "-") == (sign_below == "-") else -ratio
    if match := _FRACTION.fullmatch(text):
        sign, whole, top, bottom = match.groups()
        part = _divide(Fraction(top), Fraction(bottom))
        if part is None or (whole and part < 0):
            return None
        part += int(whole or 0)
        return -part if sign == "-" else part
    return None


def _divide(top: Fraction, bottom: Fraction) -> Fraction | None:
    return top / bottom if bottom else None
