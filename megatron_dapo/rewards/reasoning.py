"""Tasks of the reasoning-gym package, scored by the scorers that come with them."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_dapo.rewards.errors import RewardError
from megatron_dapo.rewards.extract import final_answer
from megatron_dapo.rewards.verdict import INVALID


def score(task: str, solution: str, ground_truth: str, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """The task's own score in [0, 1] of the final answer; right when it is 1.

    `extra_info["entry"]` is the problem as reasoning-gym made it, in JSON; `ground_truth` stands in for its answer.
    """
    answer = final_answer(solution)
    entry = json.loads(extra_info.get("entry") or "{}")
    value = float(_scorer(task)(None if answer == INVALID else answer, {"answer": ground_truth, **entry}))
    return {"score": value, "acc": value >= 1.0, "pred": answer}


@lru_cache(maxsize=64)
def _scorer(task: str) -> Any:
    try:
        from reasoning_gym.factory import get_score_answer_fn
    except ImportError as error:
        raise RewardError("reasoning-gym tasks need the package: pip install 'megatron-dapo[reasoning-gym]'") from error
    return get_score_answer_fn(task)
