"""Which verifier judges which data source; the default reward function of the project."""

import atexit
import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megatron_dapo.rewards import gsm8k, math_robust, math_strict, plain
from megatron_dapo.rewards.errors import RewardError, UnknownDataSource
from megatron_dapo.rewards.verdict import Pending, Verdict, signed

if TYPE_CHECKING:
    from megatron_dapo.rewards.pool import Pool

Extra = Mapping[str, Any]
Answer = Verdict | Pending

REASONING = ("reasoning_gym:", "reasoning-gym:", "reasoning_gym/")
DEADLINE_S = 10.0


def _math(solution: str, truth: str, _extra: Extra, strict: bool) -> Answer:
    return math_strict.verify(solution, truth) if strict else math_robust.verify(solution, truth)


VERIFIERS: dict[str, Callable[[str, str, Extra, bool], Answer]] = {
    "math_dapo": _math,
    "gsm8k": lambda solution, truth, _extra, strict: gsm8k.verify(solution, truth, strict=strict),
    "choice": lambda solution, truth, _extra, _strict: plain.choice(solution, truth),
    "exact": lambda solution, truth, _extra, _strict: plain.exact(solution, truth),
    "json": lambda solution, truth, _extra, _strict: plain.json_match(solution, truth),
    "regex": lambda solution, truth, _extra, _strict: Pending("regex", (solution, truth)),
}

# Data sources by name; a source that starts with a key of PREFIXES belongs there too.
SOURCES = {
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "arithmetic": "math_dapo",
    "math-500": "math_dapo",
    "HuggingFaceH4/MATH-500": "math_dapo",
    "lighteval/MATH": "math_dapo",
    "DigitalLearningGmbH/MATH-lighteval": "math_dapo",
    "openai/gsm8k": "gsm8k",
    "multiple_choice": "choice",
} | {name: name for name in VERIFIERS}
PREFIXES = {"aime": "math_dapo", "amc": "math_dapo", "gpqa": "choice", "mmlu": "choice", "arc_": "choice"}


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Extra | None = None,
    strict: bool = False,
) -> dict[str, Any]:
    """Score one response: {score, acc, pred, ...}. Math scores are 1 or -1, all others 1 or 0.

    The data source picks the verifier; `extra_info["verifier"]` overrules it. `strict` applies the published rules to
    math and GSM8K. Formulas that need algebra are compared in a worker process within DEADLINE_S; if the worker is lost
    twice the answer is RewardError, not a score. Raises UnknownDataSource for a source without a verifier.
    """
    answer = quick(data_source, solution_str, ground_truth, extra_info or {}, strict=strict)
    if isinstance(answer, Verdict):
        return answer.as_dict()
    outcome = _shared_pool(os.getpid()).run([(answer.kind, answer.arguments)])[0]
    verdict = resolve(answer, outcome.status, outcome.value, outcome.cpu_s)
    if verdict is None:
        raise RewardError(f"no verdict for data_source={data_source!r}: {outcome.status}: {outcome.value}")
    return verdict.as_dict()


def quick(data_source: str, solution: str, ground_truth: str, extra_info: Extra, *, strict: bool) -> Answer:
    """The verdict where plain rules decide in linear time, else the job that is left to do."""
    if not extra_info.get("verifier") and data_source.startswith(REASONING):
        task = data_source[len(REASONING[0]) :]
        _require_reasoning_gym()
        return Pending("reasoning_gym", (task, solution, ground_truth, dict(extra_info)))
    return VERIFIERS[verifier_name(data_source, extra_info)](solution, ground_truth, extra_info, strict)


def verifier_name(data_source: str, extra_info: Extra) -> str:
    """The key of VERIFIERS for a data source. Raises UnknownDataSource."""
    wanted = extra_info.get("verifier") or SOURCES.get(data_source)
    if wanted is None:
        wanted = next((name for prefix, name in PREFIXES.items() if data_source.lower().startswith(prefix)), None)
    if wanted not in VERIFIERS:
        raise UnknownDataSource(
            f"no verifier for data_source={data_source!r}: known are {', '.join(sorted(SOURCES))}, names starting "
            f"with {', '.join(PREFIXES)}, and reasoning_gym:<task>. Set extra_info.verifier to one of "
            f"{', '.join(VERIFIERS)}, or reward.custom_function.path to a file with your own compute_score"
        )
    return str(wanted)


def resolve(pending: Pending, status: str, value: Any, cpu_s: float = 0.0) -> Verdict | None:
    """The verdict that a worker's answer amounts to; None for a failure that says nothing about the response.

    Algebra that used up its computing time has failed to show the answer right, so the answer counts as wrong. A worker
    that was killed while it hardly got the processor, or that died, says nothing.
    """
    if pending.kind == "symbolic":
        if status == "ok":
            result = {True: "equal", False: "different", None: "undecided"}[value]
            return signed(value is True, pending.prediction, symbolic=result)
        if status == "timeout" and cpu_s >= math_robust.SYMBOLIC_CPU_SECONDS:
            return signed(False, pending.prediction, symbolic="undecided")
        return None
    if status != "ok":
        return None
    return Verdict(value["score"], value["acc"], value["pred"])


@lru_cache(maxsize=1)
def _require_reasoning_gym() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise RewardError("reasoning-gym tasks need the package: pip install 'megatron-dapo[reasoning-gym]'")


@lru_cache(maxsize=1)
def _shared_pool(_pid: int) -> "Pool":
    """One worker for plain calls of `compute_score`; a forked child gets its own."""
    from megatron_dapo.rewards.pool import Pool
    from megatron_dapo.rewards.worker import Setup

    pool = Pool(1, Setup(DEADLINE_S, cpu_budget_s=math_robust.SYMBOLIC_CPU_SECONDS))
    atexit.register(pool.close)
    return pool
