"""Which verifier judges which data source; the default reward function of the project."""

from collections.abc import Mapping
from typing import Any

from megatron_dapo.rewards import gsm8k, math_robust, math_strict
from megatron_dapo.rewards.verdict import Verdict, signed

MATH_SOURCES = frozenset({"math_dapo", "math", "math_dapo_reasoning"})


class UnknownDataSource(NotImplementedError):
    """No verifier is registered for a data source."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> dict[str, Any]:
    """Score one response: {score, acc, pred, ...}.

    `strict` applies the published DAPO rules to math and GSM8K. Raises UnknownDataSource for a source without verifier.
    """
    verdict = quick(data_source, solution_str, ground_truth, extra_info, strict=strict)
    if isinstance(verdict, math_robust.Undecided):
        verdict = signed(False, verdict.prediction)
    return verdict.as_dict()


def quick(
    data_source: str, solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None, *, strict: bool
) -> Verdict | math_robust.Undecided:
    """The verdict where plain rules decide in linear time, else what is left to decide."""
    if data_source in MATH_SOURCES or data_source.startswith("aime"):
        return math_strict.verify(solution, ground_truth) if strict else math_robust.verify(solution, ground_truth)
    if data_source in ("gsm8k", "openai/gsm8k"):
        return gsm8k.verify(solution, ground_truth, strict=strict)
    raise UnknownDataSource(f"no verifier for data_source={data_source!r}; set reward.custom_function.path to your own")
