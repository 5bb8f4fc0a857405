"""One self-contained HTML page per report: the runs' data as JSON, Plotly and our own style and script, all inlined."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from plotly.offline import get_plotlyjs

from megatron_dapo.report.charts import sections
from megatron_dapo.report.health import figures, notes
from megatron_dapo.report.run_files import Row, RunFiles, config_difference, natural, read_runs

SHOWN_REPORTS = 12  # expert maps and sample steps that the page can switch between, evenly spaced
SHOWN_SAMPLES = 3  # best and worst, each
LONGEST_TEXT = 8000  # characters of a prompt or response
DIGITS = 6  # significant digits; a plot shows fewer


def write_report(run_dirs: Sequence[Path | str], output: Path | str | None = None) -> Path:
    """Writes the report of one or several runs and returns its path (default: `report.html` in the first run).

    Raises UserError where a directory is not a run.
    """
    runs = read_runs(run_dirs)
    path = Path(output) if output is not None else runs[0].path / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(payload(runs)), encoding="utf-8")
    return path


def page(data: dict[str, Any]) -> str:
    """The HTML around the data."""
    assets = files("megatron_dapo.report") / "assets"
    parts = {
        "{{style}}": (assets / "page.css").read_text(encoding="utf-8"),
        "{{plotly}}": get_plotlyjs(),
        "{{script}}": (assets / "page.js").read_text(encoding="utf-8"),
        # "<" would let a generated "</script>" end the data
        "{{data}}": json.dumps(data, allow_nan=False, ensure_ascii=False).replace("<", "\\u003c"),
    }
    html = (assets / "page.html").read_text(encoding="utf-8")
    head, *rest = html.split("{{")
    pieces = [head]
    for piece in rest:  # in one pass: what is inserted is never searched for placeholders
        name, _, tail = piece.partition("}}")
        pieces += [parts["{{" + name + "}}"], tail]
    return "".join(pieces)


def payload(runs: list[RunFiles]) -> dict[str, Any]:
    """Everything the script needs, as plain JSON values."""
    return {
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": [_run(run) for run in runs],
        "sections": [asdict(section) for section in sections(runs)],
        "difference": [
            {"key": key, "values": [_short(value) for value in values]} for key, values in config_difference(runs)
        ],
    }


def _run(run: RunFiles) -> dict[str, Any]:
    names = [name for name in sorted(run.names, key=natural) if "/layer_" not in name]  # the heat maps show layers
    return {
        "name": run.name,
        "path": str(run.path),
        "steps": run.steps,
        "columns": {name: [_number(x) for x in run.column(name)] for name in names},
        "figures": [asdict(figure) for figure in figures(run)],
        "notes": [asdict(note) for note in notes(run)],
        "config": yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True) if run.config else "",
        "moe": {source: _moe(run, source) for source in dict.fromkeys(row["source"] for row in run.moe)},
        "what_if": dict(run.what_if),
        "samples": [_samples(run, step) for step in spaced(run.rollout_steps(), SHOWN_REPORTS)],
    }


def _moe(run: RunFiles, source: str) -> list[dict[str, Any]]:
    """Load of each expert (1 = even share) and of each GPU, for some of the reports."""
    reports = []
    for row in spaced([row for row in run.moe if row["source"] == source], SHOWN_REPORTS):
        load = [[round(x * len(layer) / max(sum(layer), 1), 3) for x in layer] for layer in row["counts"]]
        report = {"step": row["step"], "load": load, "assignments": sum(map(sum, row["counts"]))}
        if "gpu_load" in row:
            report |= {"gpu_load": row["gpu_load"], "gpus_per_node": row["gpus_per_node"]}
        reports.append(report)
    return reports


def _samples(run: RunFiles, step: int) -> dict[str, Any]:
    """The best and the worst generations of a step, by reward; of equal ones the longer first."""
    rows = sorted(run.rollouts(step), key=lambda row: (row["reward"], row["length"]), reverse=True)
    best = _of_distinct_prompts(rows)
    worst = [row for row in _of_distinct_prompts(reversed(rows)) if row not in best]
    return {
        "step": step,
        "trajectories": len(rows),
        "best": [_sample(r) for r in best],
        "worst": [_sample(r) for r in worst],
    }


def _of_distinct_prompts(rows: Iterable[Row]) -> list[Row]:
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["uid"], row)
    return list(first.values())[:SHOWN_SAMPLES]


def _sample(row: Row) -> dict[str, Any]:
    texts = {key: _text(str(row[key])) for key in ("prompt", "response", "ground_truth")}
    numbers = {key: _number(row.get(key)) for key in ("reward", "raw", "acc", "length", "advantage")}
    return texts | numbers | {"uid": row["uid"], "finish_reason": row.get("finish_reason", "")}


def spaced(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _number(value: Any) -> float | None:
    """JSON has no NaN: what is not finite is a gap in the line (and a note at the head of the page)."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def _text(text: str) -> str:
    left_out = len(text) - LONGEST_TEXT
    return text if left_out <= 0 else f"{text[:LONGEST_TEXT]}\n… {left_out} characters left out"


def _short(value: Any) -> str:
    return "" if value is None else str(value)
