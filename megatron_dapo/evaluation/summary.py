"""From judged answers to what is kept of an evaluation: parquet of every generation, a summary, a table to read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from megatron_dapo.data.types import Prompt, Score
from megatron_dapo.evaluation.answers import Answer
from megatron_dapo.metrics import Metrics, Samples, compute, estimates, validation_metrics
from megatron_dapo.rewards.verdict import INVALID


@dataclass(frozen=True)
class Judged:
    """One answer with what was asked and what the verifier said."""

    prompt: Prompt
    answer: Answer
    score: Score


def summarize(judged: Sequence[Judged], *, seed: int) -> dict[str, Any]:
    """Counts and estimates per data source, and `metrics` under the names of in-training validation.

    An answer whose verifier failed is counted in `unscored` and in nothing else; names keep the n that was asked for.
    """
    sources = list(dict.fromkeys(row.prompt.data_source for row in judged))
    return {
        "sources": {
            source: _of_source([r for r in judged if r.prompt.data_source == source], seed) for source in sources
        },
        "metrics": compute(scored_metrics([row.prompt for row in judged], [row.score for row in judged])),
    }


def scored_metrics(prompts: Sequence[Prompt], scores: Sequence[Score]) -> Metrics:
    """`val-core/<source>/acc/mean@n` and companions, of an evaluation as of validation during training.

    One entry per sample that was drawn, those that could not be scored included.
    """
    return validation_metrics(
        [prompt.data_source for prompt in prompts],
        [prompt.uid for prompt in prompts],
        {"acc": [score.acc for score in scores], "reward": [score.raw for score in scores]},
        [score.extra.get("pred") for score in scores],
        scored=[score.status == "ok" for score in scores],
    )


def _of_source(judged: Sequence[Judged], seed: int) -> dict[str, Any]:
    problems: dict[int, list[Score]] = {}
    for row in judged:
        problems.setdefault(row.answer.problem, []).append(row.score)
    asked = min(map(len, problems.values()))
    scored = [[score for score in scores if score.status == "ok"] for scores in problems.values()]
    samples = [Samples(tuple(s.acc for s in some), tuple(_said(s) for s in some)) for some in scored if some]
    return {
        "problems": len(problems),
        "samples": len(judged),
        "unscored": sum(row.score.status != "ok" for row in judged),
        "truncated": sum(row.answer.finish_reason == "length" for row in judged),
        "mean_tokens": sum(row.answer.tokens for row in judged) / len(judged),
        "estimates": {name: asdict(estimate) for name, estimate in estimates(samples, asked, seed=seed).items()},
    }


def _said(score: Score) -> str | None:
    """The answer that the verifier read; None where it found none."""
    said = score.extra.get("pred")
    return None if said is None or said == INVALID else str(said)


def write_generations(judged: Sequence[Judged], path: Path) -> None:
    """One row per answer; the file appears only when it is complete."""
    rows = [
        {
            "problem": row.answer.problem,
            "sample": row.answer.sample,
            "data_source": row.prompt.data_source,
            "prompt": list(row.prompt.messages),
            "response": row.answer.text,
            "tokens": row.answer.tokens,
            "finish_reason": row.answer.finish_reason,
            "ground_truth": row.prompt.ground_truth,
            "pred": _said(row.score),
            "acc": row.score.acc,
            "reward": row.score.reward,
            "status": row.score.status,
        }
        for row in judged
    ]
    partial = path.with_name(path.name + ".partial")
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), partial, compression="zstd")
    partial.replace(path)


def table(summary: dict[str, Any]) -> str:
    """The summary for people: one block per data source."""
    lines = []
    for source, found in summary["sources"].items():
        lines.append(
            f"{source}: {found['problems']} problems, {found['samples']} answers of {found['mean_tokens']:.1f} tokens"
            + (f", {found['truncated']} cut at the limit" if found["truncated"] else "")
            + (f", {found['unscored']} could not be judged" if found["unscored"] else "")
        )
        for name, e in found["estimates"].items():
            lines.append(f"  {name:<10}{e['value']:>8.2%}   95 % interval {e['low']:.2%} to {e['high']:.2%}")
    return "\n".join(lines)
