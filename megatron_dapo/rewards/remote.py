"""The built-in jobs that run in a worker process, because a hostile answer could make them slow."""

import re
from collections.abc import Callable
from typing import Any

from megatron_dapo.rewards import reasoning
from megatron_dapo.rewards.symbolic import equal
from megatron_dapo.rewards.verdict import INVALID


def regex(solution: str, pattern: str) -> dict[str, Any]:
    """1 when the pattern is found in the response, else 0; a pattern may take exponential time, hence a worker."""
    found = re.search(pattern, solution)
    right = found is not None
    return {"score": float(right), "acc": right, "pred": INVALID if found is None else found[0]}


HANDLERS: dict[str, Callable[..., Any]] = {"symbolic": equal, "regex": regex, "reasoning_gym": reasoning.score}


# The first question to sympy imports much of it; that must not count against a job's deadline.
equal("x^{2}+2x+1", "(x+1)^{2}")
