"""What a person would notice first in a run: a few plain rules with their thresholds, and the headline figures."""

import math
from dataclasses import dataclass
from statistics import fmean, median

from megatron_dapo.report.run_files import RunFiles


@dataclass(frozen=True)
class Note:
    """`level` is "bad", "warn" or "good"."""

    level: str
    text: str


@dataclass(frozen=True)
class Figure:
    """A headline: value, what it was before (empty when that says nothing), and whether the change is good."""

    label: str
    value: str
    before: str = ""
    good: bool | None = None


def notes(run: RunFiles) -> list[Note]:
    """Findings about one run, worst first; a single good note when nothing stands out."""
    found = [*_broken(run), *_learning(run), *_lengths(run), *_experts(run)]
    found.sort(key=lambda note: ("bad", "warn", "good").index(note.level))
    return found or [Note("good", "Nothing stands out: log-probs agree, entropy holds, groups carry signal.")]


def figures(run: RunFiles) -> list[Figure]:
    """The tiles at the head of the report."""
    total = run.total_steps
    last_step = run.steps[-1] if run.rows else 0
    tiles = [Figure("Steps", f"{last_step}", f"of {total}" if total and total != last_step else "")]
    core = [name for name in run.names if name.startswith("val-core/") and "/mean@" in name]
    for name in core[:2]:
        source = name.split("/")[1] if len(core) > 1 else "validation"
        tiles += _change(run, name, f"Accuracy, {source}", "{:.1%}", ends=True)
    tiles += _change(run, "reward/acc/mean", "Training accuracy", "{:.1%}")
    tiles += _change(run, "critic/score/mean", "Score", "{:.3f}")
    tiles += _change(run, "actor/entropy", "Entropy", "{:.3f}", better=None)
    tiles += _change(run, "response_length/mean", "Response length", "{:.0f}", better=None)
    tiles += _change(run, "response_length/clip_ratio", "Hit length limit", "{:.1%}", better=-1)
    seconds = [value for _, value in run.series("perf/time_per_step")]
    if seconds:
        tiles.append(Figure("Seconds per step", f"{median(seconds):.3g}", f"{duration(sum(seconds))} in all"))
    speed = [value for _, value in run.series("perf/throughput")]
    if speed:
        tiles.append(Figure("Tokens/s/device", f"{median(speed):,.0f}"))
    difference = [value for _, value in run.series("training/rollout_logprob_diff_max")]
    if difference:
        tiles.append(Figure("Largest Δ log-prob", f"{max(difference):.1e}", "train vs. rollout"))
    return tiles


def duration(seconds: float) -> str:
    """`3 h 12 min`, `4 min 05 s`, `12 s`."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def start_and_end(run: RunFiles, name: str) -> tuple[float, float] | None:
    """Means over the first and last tenth of the steps that have the metric; None where it is missing."""
    values = [value for _, value in run.series(name) if math.isfinite(value)]
    if not values:
        return None
    tenth = max(1, len(values) // 10)
    return fmean(values[:tenth]), fmean(values[-tenth:])


def _change(
    run: RunFiles, name: str, label: str, form: str, *, better: int | None = 1, ends: bool = False
) -> list[Figure]:
    both = start_and_end(run, name)
    if ends and both:
        values = [value for _, value in run.series(name)]
        both = values[0], values[-1]
    if both is None:
        return []
    before, after = (form.format(x) for x in both)
    good = None if better is None or before == after else (both[1] - both[0]) * better > 0
    return [Figure(label, after, f"from {before}" if before != after else "", good)]


def _broken(run: RunFiles) -> list[Note]:
    found = []
    for name in run.names:
        at = [step for step, value in run.series(name) if not math.isfinite(value)]
        if at:
            found.append(
                Note("bad", f"{name} is not finite at step {at[0]}" + (f" and {len(at) - 1} more" if at[1:] else ""))
            )
    if failed := sum(value for _, value in run.series("push/failed")):
        found.append(Note("bad", f"{failed:.0f} weight pushes failed (a dead engine, a checksum) and were repeated."))
    worst = max((value for _, value in run.series("training/rollout_logprob_diff_max")), default=0.0)
    low_precision = run.config.get("model", {}).get("dtype") not in (None, "float32")
    limit = 1.0 if low_precision else 1e-3
    if worst > limit:
        found.append(
            Note("bad", f"Trainer and rollout disagree by up to {worst:.2g} in log-prob (expected below {limit:g}).")
        )
    return found


def _learning(run: RunFiles) -> list[Note]:
    found = []
    entropy = start_and_end(run, "actor/entropy")
    if entropy and entropy[1] < 0.1 * entropy[0]:
        found.append(Note("warn", f"Entropy fell from {entropy[0]:.2g} to {entropy[1]:.2g}: exploration is ending."))
    score = start_and_end(run, "critic/score/mean")
    if score and len(run.rows) >= 20 and score[1] <= score[0]:
        found.append(Note("warn", f"The score did not rise: {score[0]:.3g} at first, {score[1]:.3g} now."))
    kept, made = (start_and_end(run, f"training/filter_groups/{name}") for name in ("kept", "generated"))
    if kept and made and made[1] and kept[1] / made[1] < 0.2:
        found.append(
            Note("warn", f"Only {kept[1] / made[1]:.0%} of groups carry signal now: data too easy or too hard.")
        )
    norms = [(value, step) for step, value in run.series("actor/grad_norm") if math.isfinite(value)]
    if norms and max(norms)[0] > 20 * (usual := median(value for value, _ in norms)):
        found.append(
            Note(
                "warn", f"The gradient norm jumped to {max(norms)[0]:.3g} at step {max(norms)[1]} (median {usual:.2g})."
            )
        )
    clipped = start_and_end(run, "actor/pg_clipfrac")
    if clipped and clipped[1] > 0.3:
        found.append(Note("warn", f"{clipped[1]:.0%} of tokens are clipped: the policy moves far within a step."))
    return found


def _lengths(run: RunFiles) -> list[Note]:
    clipped = start_and_end(run, "response_length/clip_ratio")
    if clipped and clipped[1] > 0.2:
        return [Note("warn", f"{clipped[1]:.0%} of responses hit the length limit.")]
    return []


def _experts(run: RunFiles) -> list[Note]:
    found = []
    for source in ("rollout", "training"):
        if silent := [step for step, value in run.series(f"{source}/moe/routed_experts_found") if value == 0]:
            found.append(Note("warn", f"No expert choices came from {source} at step {silent[0]}: loads are unknown."))
        if wrong := sum(value for _, value in run.series(f"{source}/moe/invalid_assignments")):
            found.append(Note("bad", f"{wrong:,.0f} expert ids of {source} are out of range: routing is misread."))
    cost = start_and_end(run, "rollout/moe/gpu_load/max_over_mean")
    if cost and cost[1] > 1.5:
        found.append(Note("warn", f"Uneven experts cost a factor of {cost[1]:.2f} in expert layers; see “Experts”."))
    return found
