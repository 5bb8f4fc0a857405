"""Are two formulas equal? Algebra by math-verify, believed only when numbers agree; runs in a worker process.

math-verify alone has known false positives (differences below an absolute tolerance, an interval against a set, a
decimal against an exact value after rounding). So its yes counts only if both sides, evaluated to 30 digits at several
points, agree to a relative 1e-9, and if they are the same kind of object. Its no is final.
"""

import logging
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from math_verify import verify as algebraically_equal

from megatron_dapo.rewards.math_robust import SYMBOLIC_CPU_SECONDS

RELATIVE_TOLERANCE = sympy.Float("1e-9", 30)
POINTS = 3

# Text that algebra misreads: clock times and ratios, ellipses, towers and factorials too large to evaluate.
_MISREAD = re.compile(r"\d:\d|\\[lc]?dots|\.\.\.|\^\{?\d+\^|\d{5,}!|\^\{?-?\d{5,}|\d!{2,}")

# Units were dealt with in `math_robust`; math-verify would also drop the variable of 5m.
_EXTRACTION = LatexExtractionConfig(
    normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
)

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)


class _OutOfTime(BaseException):
    """Not an Exception, so that no library's `except Exception` can swallow it."""


def equal(prediction: str, truth: str) -> bool | None:
    """Whether two cleaned LaTeX answers mean the same; None when it could not be told within SYMBOLIC_CPU_SECONDS."""
    if _MISREAD.search(prediction) or _MISREAD.search(truth):
        return False
    if ("\\pm" in prediction) != ("\\pm" in truth):
        return False
    try:
        with _cpu_budget(SYMBOLIC_CPU_SECONDS):
            ours, theirs = _parse(prediction), _parse(truth)
            if ours is None or theirs is None:
                return False
            return bool(algebraically_equal(theirs, ours, timeout_seconds=None)) and agree(ours, theirs)
    except (_OutOfTime, MemoryError, RecursionError):
        return None


@contextmanager
def _cpu_budget(seconds: float) -> Iterator[None]:
    """Raise _OutOfTime after so many seconds of CPU time, again and again until someone lets it through."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _parse(text: str) -> Any | None:
    found = parse(f"${text}$", extraction_config=[_EXTRACTION], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found and not isinstance(found[0], str) else None


def agree(a: Any, b: Any) -> bool:
    """Whether two parsed answers are the same kind of object with numerically equal parts. False when in doubt."""
    if isinstance(a, sympy.Eq) != isinstance(b, sympy.Eq):
        a, b = (side.rhs if isinstance(side, sympy.Eq) and side.lhs.is_Symbol else side for side in (a, b))
    if isinstance(a, sympy.Rel) != isinstance(b, sympy.Rel):  # x >= 2 is the interval from 2 up
        a, b = _solutions(a), _solutions(b)
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(map(_close, a.flat(), b.flat()))
    if isinstance(a, sympy.Tuple | tuple) and isinstance(b, sympy.Tuple | tuple):
        return len(a) == len(b) and all(map(agree, a, b))
    if isinstance(a, sympy.FiniteSet) and isinstance(b, sympy.FiniteSet):
        return _same_members(list(a.args), list(b.args))
    if isinstance(a, sympy.Interval) and isinstance(b, sympy.Interval):
        ends = _close(a.start, b.start) and _close(a.end, b.end)
        return ends and bool(a.left_open == b.left_open and a.right_open == b.right_open)
    if isinstance(a, sympy.Union) and isinstance(b, sympy.Union):
        return _same_members(list(a.args), list(b.args))
    if isinstance(a, sympy.Rel) and isinstance(b, sympy.Rel):
        return _same_relation(a, b)
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return _close(a, b)
    return type(a) is type(b) and a == b


def _solutions(side: Any) -> Any:
    """The set that an inequality in one unknown describes; anything else as it is."""
    if isinstance(side, sympy.Rel) and not isinstance(side, sympy.Eq) and len(side.free_symbols) == 1:
        return side.as_set()
    return side


def _same_members(ours: list, theirs: list) -> bool:
    """Equal as sets of equal size: each of ours takes one of theirs."""
    for member in ours:
        match = next((i for i, other in enumerate(theirs) if agree(member, other)), None)
        if match is None:
            return False
        theirs.pop(match)
    return not theirs


def _same_relation(a: Any, b: Any) -> bool:
    """Equations are the same when their sides differ by proportional amounts; inequalities too, sign included."""
    if a.rel_op != b.rel_op:
        b = b.reversed
    if a.rel_op != b.rel_op:
        return False
    first, second = a.lhs - a.rhs, b.lhs - b.rhs
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    ratios = []
    for point in range(POINTS):
        x, y = _value(first, symbols, point), _value(second, symbols, point)
        if x is None or y is None or y == 0:
            return False
        ratios.append(x / y)
    same = all(_near(ratio, ratios[0]) for ratio in ratios)
    return same and (isinstance(a, sympy.Eq | sympy.Ne) or bool(sympy.re(ratios[0]) > 0))


def _close(a: Any, b: Any) -> bool:
    """Whether two expressions have the same value at every point looked at."""
    if a == b:
        return True
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    for point in range(POINTS if symbols else 1):
        x, y = _value(a, symbols, point), _value(b, symbols, point)
        if x is None or y is None or not _near(x, y):
            return False
    return True


def _value(expression: Any, symbols: list, point: int) -> Any | None:
    """The number that `expression` is, with its symbols at fixed rational points; None when it is none."""
    places = {symbol: sympy.Rational(7 * point + 3 * i + 5, 11 + 2 * i + point) for i, symbol in enumerate(symbols)}
    value = sympy.N(expression.subs(places), 30)
    return value if value.is_number and value.is_finite else None


def _near(x: Any, y: Any) -> bool:
    return bool(abs(x - y) <= RELATIVE_TOLERANCE * max(abs(x), abs(y)))
