"""A live view of a run in the terminal, read from the files that the run writes, here or on another machine."""

import re
import subprocess
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_dapo.errors import UserError
from megatron_dapo.report.health import duration, notes
from megatron_dapo.report.run_files import CONFIG, METRICS, RunFiles, read_run

BARS = "▁▂▃▄▅▆▇█"
COLORS = ("blue", "green", "magenta", "yellow", "cyan", "red", "bright_blue", "bright_green", "bright_magenta")
WATCHED = (
    ("accuracy", "reward/acc/mean", "{:.1%}"),
    ("score", "critic/score/mean", "{:.3f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("KL", "actor/ppo_kl", "{:.1e}"),
    ("gradient norm", "actor/grad_norm", "{:.3f}"),
    ("response length", "response_length/mean", "{:.0f}"),
    ("hit length limit", "response_length/clip_ratio", "{:.1%}"),
    ("groups kept", "training/filter_groups/kept", "{:.0f}"),
    ("staleness", "training/off_policy/trajectory_staleness/mean", "{:.2f}"),
    ("Δ log-prob, max", "training/rollout_logprob_diff_max", "{:.1e}"),
    ("tokens/s/device", "perf/throughput", "{:,.0f}"),
    ("loss", "sft/loss", "{:.4f}"),
)
REMOTE = re.compile(r"(?P<host>[\w.-]+(@[\w.-]+)?):(?P<path>.+)")


def watch(run_dir: Path | str, *, interval: float = 2.0, once: bool = False, console: Console | None = None) -> None:
    """Shows the run until it has reached its last step or Ctrl-C; `once` prints one picture and returns.

    `run_dir` may be `host:directory`: the files are then fetched with ssh, which must work without a password.
    Waits for a run that has not written anything yet, unless `once`.
    """
    console = console or Console()
    remote = None if Path(run_dir).exists() else REMOTE.fullmatch(str(run_dir))
    with tempfile.TemporaryDirectory() if remote else nullcontext(str(run_dir)) as directory:

        def look() -> RunFiles:
            if remote:
                fetch(remote["host"], remote["path"], Path(directory))
            return read_run(directory)

        if once:
            console.print(picture(look(), console.width))
            return
        with Live(console=console, refresh_per_second=4) as live:
            while not _show(live, look, console):
                time.sleep(interval)


def _show(live: Live, look: Any, console: Console) -> bool:
    """One round; whether the run has reached its end."""
    try:
        run = look()
    except UserError as error:  # the run may not have begun
        live.update(Text(f"waiting: {error}", style="dim"))
        return False
    live.update(picture(run, console.width))
    return run.total_steps is not None and run.steps[-1] >= run.total_steps if run.rows else False


def fetch(host: str, path: str, directory: Path) -> None:
    """Copies the small files of a remote run: its metrics, its config and its newest samples."""
    quoted = "'" + path.replace("'", "'\\''") + "'"
    script = f"cd {quoted} && tar cf - {METRICS} $(ls {CONFIG} 2>/dev/null) $(ls -t rollouts/* 2>/dev/null | head -1)"
    try:
        archive = subprocess.run(["ssh", host, script], capture_output=True, check=False, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise UserError(f"cannot read {host}:{path} with ssh: {error}") from error
    if archive.returncode:
        raise UserError(f"cannot read {host}:{path} with ssh: {archive.stderr.decode(errors='replace').strip()}")
    subprocess.run(["tar", "xf", "-", "-C", str(directory)], input=archive.stdout, check=True)


def picture(run: RunFiles, width: int = 120) -> RenderableType:
    """The whole view: progress, metrics with their curves, stages of the last steps, notes, a sample."""
    if not run.rows:
        return Panel("no step yet", title=Text(run.name))
    wide = width >= 100
    tables: list[RenderableType] = [_metrics(run, width // 2 - 6 if wide else width - 6), _stages(run, width)]
    body = Columns(tables, padding=(0, 2), expand=False) if wide else Group(*tables)
    parts = [_progress(run, width), body, _notes(run), _sample(run)]
    return Panel(
        Group(*(part for part in parts if part is not None)),
        title=Text(run.name, style="bold"),
        subtitle=Text(str(run.path)),
    )


def sparkline(values: list[float], width: int) -> str:
    """The last values as a row of bars, averaged where there are more than fit."""
    values = [value for value in values if value == value]
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(chunk) / len(chunk) for chunk in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    return "".join(BARS[int((x - low) / (high - low) * 7.999)] if high > low else BARS[3] for x in means)


def _progress(run: RunFiles, width: int) -> RenderableType:
    step, total = run.steps[-1], run.total_steps
    seconds = [value for _, value in run.series("timing_s/step")] or [v for _, v in run.series("perf/time_per_step")]
    recent = sorted(seconds[-20:])[len(seconds[-20:]) // 2] if seconds else None
    row = Table.grid(padding=(0, 2))
    cells: list[RenderableType] = [Text(f"step {step}" + (f" of {total}" if total else ""), style="bold")]
    if total:
        cells.append(ProgressBar(total=total, completed=min(step, total), width=max(10, width // 3)))
    if recent is not None:
        cells.append(Text(f"{recent:.3g} s/step"))
        if total and step < total:
            cells.append(Text(f"{duration(recent * (total - step))} to go", style="cyan"))
        elif total:
            cells.append(Text(f"done in {duration(sum(seconds))}", style="green"))
    row.add_row(*cells)
    return row


def _metrics(run: RunFiles, width: int) -> Table:
    table = Table(box=None, padding=(0, 1), show_header=False)
    validation = [(name.split("/", 1)[1], name, "{:.1%}") for name in run.names if name.startswith("val-core/")]
    for label, name, form in [*WATCHED, *(v for v in validation if "/mean@" in v[1])]:
        values = [value for _, value in run.series(name)]
        if values:
            curve = sparkline(values, max(8, min(40, width - 36)))
            table.add_row(
                Text(label, style="dim"),
                Text(form.format(values[-1] + 0.0), justify="right"),
                Text(curve, style="blue"),
            )
    return table


def _stages(run: RunFiles, width: int) -> Table:
    """Mean seconds of each stage over the last ten steps that had it, as bars."""
    names = [name for name in run.names if name.startswith("timing_s/") and name != "timing_s/step"]
    means = {name: [value for _, value in run.series(name)][-10:] for name in names}
    seconds = {name.removeprefix("timing_s/"): sum(values) / len(values) for name, values in means.items()}
    table = Table(box=None, padding=(0, 1), show_header=False)
    longest = max(seconds.values(), default=0.0)
    for (name, value), color in zip(sorted(seconds.items(), key=lambda x: -x[1]), COLORS, strict=False):
        bar = "█" * max(1, round(value / longest * max(8, min(28, width // 5)))) if longest > 0 else ""
        table.add_row(Text(name, style="dim"), Text(f"{value:.2f} s", justify="right"), Text(bar, style=color))
    return table


def _notes(run: RunFiles) -> RenderableType:
    style = {"good": "green", "warn": "yellow", "bad": "bold red"}
    return Group(*(Text(f"● {note.text}", style=style[note.level]) for note in notes(run)))


def _sample(run: RunFiles) -> RenderableType | None:
    steps = run.rollout_steps()
    rows = run.rollouts(steps[-1]) if steps else []
    if not rows:
        return None
    best = max(rows, key=lambda row: row["reward"])
    text = Text.assemble(
        (f"{_cut(best['prompt'])}\n", "dim"),
        _cut(best["response"]),
        (f"\nexpected: {_cut(best['ground_truth'], 80)}", "dim"),
    )
    return Panel(
        text, title=f"best of step {steps[-1]}, reward {best['reward']:+.2f}", title_align="left", border_style="dim"
    )


def _cut(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else text[:limit] + " …"
