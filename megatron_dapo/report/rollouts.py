"""`megatron-dapo rollouts RUN`: what the model said in a step, what it got for it, and why it was trained or not."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.errors import UserError
from megatron_dapo.report.run_files import Row, RunFiles, read_run

INDENT = "    "


def show_rollouts(
    run_dir: Path | str,
    *,
    step: int | None = None,
    order: str | None = None,
    grep: str | None = None,
    fate: str | None = None,
    limit: int = 10,
) -> str:
    """The generations of one step (default: the newest) as text; with `grep` and no step, of all steps.

    `order` is "best" or "worst" (by reward) or None (as sampled); `grep` is a regular expression over prompt, response
    and ground truth; `fate` keeps what begins with it ("trained", "dropped", "surplus"); `limit` 0 shows all.
    """
    run = read_run(run_dir)
    steps = _steps(run, step, everything=grep is not None)
    rows = [row for number in steps for row in run.rollouts(number)]
    if not rows:
        raise UserError(f"step {steps[-1]} of {run.path} generated nothing")
    chosen = [row for row in rows if _matches(row, grep, fate)]
    if order is not None:
        chosen = sorted(chosen, key=lambda row: row["reward"], reverse=order == "best")
    shown = chosen[:limit] if limit else chosen
    more = [f"{len(chosen) - len(shown)} more (--limit 0 shows all)"] if len(shown) < len(chosen) else []
    return "\n\n".join([_head(steps, rows, chosen), *map(_entry, shown), *more]) + "\n"


def _steps(run: RunFiles, step: int | None, *, everything: bool) -> list[int]:
    there = run.rollout_steps()
    if not there:
        raise UserError(f"{run.path} has no generations: set trainer.rollout_data_dir when training")
    if step is not None and step not in there:
        raise UserError(f"step {step} has no generations in {run.path}; there are steps {there[0]} to {there[-1]}")
    return [step] if step is not None else there if everything else there[-1:]


def _matches(row: Row, grep: str | None, fate: str | None) -> bool:
    if fate is not None and not row.get("fate", "trained").startswith(fate):
        return False
    if grep is None:
        return True
    try:
        return re.search(grep, "\n".join((row["prompt"], row["response"], row["ground_truth"]))) is not None
    except re.error as error:
        raise UserError(f"--grep {grep!r} is not a regular expression: {error}") from error


def _head(steps: Sequence[int], rows: Sequence[Row], chosen: Sequence[Row]) -> str:
    groups: dict[tuple[int, str], str] = {}
    for row in rows:  # a group's first row speaks for it: samples that failed come behind
        groups.setdefault((row["step"], row["uid"]), row.get("fate", "trained"))
    fates = ", ".join(f"{count} {fate}" for fate, count in Counter(groups.values()).most_common())
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    text = f"{span}: {len(rows)} generations in {len(groups)} groups ({fates})"
    return text if len(chosen) == len(rows) else f"{text}; {len(chosen)} match"


def _entry(row: Row) -> str:
    advantage = "" if row.get("advantage") is None else f" · advantage {row['advantage']:+.3f}"
    raw = "" if row["raw"] == row["reward"] else f" (raw {row['raw']:+.2f})"
    head = (
        f"step {row['step']} · {row['uid']} sample {row['sample']} · {row['data_source']} · "
        f"reward {row['reward']:+.2f}{raw} · acc {row['acc']:g}{advantage} · {row['length']} tokens, "
        f"{row['finish_reason']} · {row.get('fate', 'trained')}"
    )
    parts = (("prompt", row["prompt"]), ("response", row["response"]), ("expected", row["ground_truth"]))
    return "\n".join([head, *(f"  {name}:\n{_indented(text)}" for name, text in parts)])


def _indented(text: str) -> str:
    return "\n".join(INDENT + line for line in text.splitlines() or [""])
