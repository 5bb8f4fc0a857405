"""Reads what a run left in its directory, also while it is still writing: metrics, config, samples, expert counts."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import yaml

from megatron_dapo.errors import UserError

METRICS, CONFIG, SUMMARY = "metrics.jsonl", "config.yaml", "summary.json"
MOE, WHAT_IF, ROLLOUTS = "moe.jsonl", "moe_what_if.json", "rollouts"
ROLLOUT_SUFFIXES = (".jsonl", ".parquet")

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """One run as the report sees it. `rows` are one per step, in order; what a run did not write is empty."""

    name: str
    path: Path
    rows: tuple[Row, ...]
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    moe: tuple[Row, ...]
    what_if: Mapping[str, Any]

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    @property
    def names(self) -> list[str]:
        """Every metric that some step has, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    def column(self, name: str) -> list[float | None]:
        """One value per row, None where a step lacks it."""
        return [row.get(name) for row in self.rows]

    def series(self, name: str) -> list[tuple[int, float]]:
        """The steps that have this metric, with its value."""
        return [(row["step"], row[name]) for row in self.rows if name in row]

    def last(self, name: str) -> float | None:
        return next((row[name] for row in reversed(self.rows) if name in row), None)

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends, as it says itself or, before that, as its configuration does."""
        told = self.last("training/total_steps")
        return self.config.get("trainer", {}).get("total_training_steps") if told is None else int(told)

    def rollout_steps(self) -> list[int]:
        """Steps whose generations were written down."""
        files = self._rollout_directory().glob("*")
        return sorted({int(file.stem) for file in files if file.stem.isdigit() and file.suffix in ROLLOUT_SUFFIXES})

    def rollouts(self, step: int) -> list[Row]:
        """One row per trajectory of a step, as `trainers/dump.py` wrote them."""
        table = self._rollout_directory() / f"{step}.parquet"
        if table.is_file():
            return pyarrow.parquet.read_table(table).to_pylist()
        return read_rows(self._rollout_directory() / f"{step}.jsonl")

    def _rollout_directory(self) -> Path:
        inside = self.path / ROLLOUTS
        configured = self.config.get("trainer", {}).get("rollout_data_dir")
        return inside if inside.is_dir() or not configured else Path(configured)


def read_run(run_dir: Path | str) -> RunFiles:
    """Raises UserError where the directory has no metrics."""
    path = Path(run_dir)
    if path.name == METRICS:  # the file itself may be given, for a run of which only that was copied
        path = path.parent
    if not (path / METRICS).is_file():
        raise UserError(
            f"{path} is not a run directory: it has no {METRICS}. Give the run's trainer.default_local_dir."
        )
    config = yaml.safe_load(_text(path / CONFIG)) or {}
    return RunFiles(
        name=config.get("trainer", {}).get("experiment_name") or path.resolve().name,
        path=path,
        rows=tuple(_by_step(read_rows(path / METRICS))),
        config=config,
        summary=json.loads(_text(path / SUMMARY) or "{}"),
        moe=tuple(_by_step(read_rows(path / MOE), key=("step", "source"))),
        what_if=json.loads(_text(path / WHAT_IF) or "{}"),
    )


def read_runs(run_dirs: Iterable[Path | str]) -> list[RunFiles]:
    """Several runs under distinct names: runs of one experiment name are told apart by their directories."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [run.path.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    return [RunFiles(**{**vars(run), "name": name}) for run, name in zip(runs, names, strict=True)]


def read_rows(path: Path) -> list[Row]:
    """The whole lines of a JSONL file, non-finite numbers restored; a missing file has none."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [_numbers(row) for line in lines if line.endswith(b"\n") and (row := _row(line)) is not None]


def _row(line: bytes) -> Row | None:
    try:
        return json.loads(line)
    except ValueError:  # a write that failed half-way; the run went on in a new line
        return None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def config_difference(runs: list[RunFiles]) -> list[tuple[str, list[Any]]]:
    """Config keys whose values differ between the runs, with each run's value (None where it lacks the key)."""
    flat = [flatten(run.config) for run in runs]
    keys = sorted({key for config in flat for key in config})
    values = [(key, [config.get(key) for config in flat]) for key in keys]
    return [(key, row) for key, row in values if any(value != row[0] for value in row)]


def natural(name: str) -> list[Any]:
    """Sort key that puts `layer_10` after `layer_9`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _by_step(rows: list[Row], key: tuple[str, ...] = ("step",)) -> list[Row]:
    """Rows in order of step. A resumed run writes some steps again: the later row's values win."""
    merged: dict[tuple, Row] = {}
    for row in rows:
        at = tuple(row[k] for k in key)
        merged[at] = merged.get(at, {}) | row
    return [merged[at] for at in sorted(merged)]


def _numbers(row: Row) -> Row:
    special = ("NaN", "Infinity", "-Infinity")
    return {key: float(value) if isinstance(value, str) and value in special else value for key, value in row.items()}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
