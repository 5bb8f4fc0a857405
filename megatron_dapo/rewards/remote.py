"""The built-in jobs that run in a worker process, because a hostile answer could make them slow."""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_dapo.rewards import reasoning
from megatron_dapo.rewards.verdict import INVALID


@dataclass(frozen=True)
class Handler:
    """What a job runs, and what must be imported before its first run: that does not count against its deadline."""

    run: Callable[..., Any]
    warm: Callable[[], Any] | None = None


def regex(solution: str, pattern: str) -> dict[str, Any]:
    """1 when the pattern is found in the response, else 0; a pattern may take exponential time, hence a worker."""
    found = re.search(pattern, solution)
    right = found is not None
    return {"score": float(right), "acc": right, "pred": INVALID if found is None else found[0]}


def symbolic(prediction: str, truth: str) -> bool | None:
    """Whether two formulas are equal."""
    from megatron_dapo.rewards.symbolic import equal

    return equal(prediction, truth)


BUILT_IN = {
    "regex": Handler(regex),
    # the first question makes sympy import much of itself
    "symbolic": Handler(symbolic, lambda: symbolic("x^{2}+2x+1", "(x+1)^{2}")),
    "reasoning_gym": Handler(reasoning.score, lambda: importlib.import_module("reasoning_gym")),
}
