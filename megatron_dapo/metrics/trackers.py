"""Where metrics go: one small adapter per tracker, imported only when asked for, none able to stop a run."""

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from megatron_dapo.metrics.jsonl import METRICS_FILE, JsonlWriter

log = logging.getLogger(__name__)
RECORD = "jsonl"  # the tracker that every run has
GIVE_UP_AFTER = 3  # failures in a row, so that a tracker that times out does not slow every step of a run


class Tracker(Protocol):
    """What an adapter does: take one step's scalars, and finish."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Console:
    """One line per step with what a person looks at first, of whatever kind of run it is; on a terminal a bar below it.

    How far it is comes from `training/total_steps`; the time left from the pace since this process began.
    """

    columns = (
        ("loss", "sft/loss", "{:.4f}"),
        ("val loss", "sft/val_loss", "{:.4f}"),
        ("reward", "critic/score/mean", "{:.3f}"),
        ("acc", "reward/acc/mean", "{:.3f}"),
        ("entropy", "actor/entropy", "{:.3f}"),
        ("kl", "actor/ppo_kl", "{:.2e}"),
        ("grad", "actor/grad_norm", "{:.2f}"),
        ("grad", "sft/grad_norm", "{:.2f}"),
        ("len", "response_length/mean", "{:.0f}"),
        ("clip", "response_length/clip_ratio", "{:.1%}"),
        ("groups", "training/filter_groups/generated", "{:.0f}"),
        ("Δlogp", "training/rollout_probs_diff_max", "{:.1e}"),
        ("s", "perf/time_per_step", "{:.1f}"),
        ("tok/s/gpu", "perf/throughput", "{:.0f}"),
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: tuple[float, int] | None = None
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, auto_refresh=False, transient=True, disable=not sys.stdout.isatty())
        self._task = self._bar.add_task("steps", total=None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        total = int(metrics.get("training/total_steps", 0))
        cells = [f"{label} {_shown(metrics[name], form)}" for label, name, form in self.columns if name in metrics]
        validation = [f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("val-core/")]
        line = f"step {step:>5}" + (f"/{total}" if total else "")
        text = " | ".join([line, *cells, *validation, *self._time_left(step, total)])
        self._bar.start()
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._bar.update(self._task, completed=step, total=total or None, refresh=True)

    def close(self) -> None:
        self._bar.stop()

    def _time_left(self, step: int, total: int) -> list[str]:
        if self._began is None:
            self._began = (self._clock(), step)
            return []
        began, first = self._began
        if not total or step == first:
            return []
        return [f"eta {timedelta(seconds=round((self._clock() - began) / (step - first) * (total - step)))}"]


class Jsonl:
    """`metrics.jsonl` in the run directory: {"step": 12, "actor/entropy": 0.7, …} per line.

    A step that could not be written (a full disk) is written together with the next.
    """

    def __init__(self, run_dir: Path) -> None:
        self._writer = JsonlWriter(run_dir / METRICS_FILE)
        self._unwritten: list[dict[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._unwritten.append({"step": step, **metrics})
        self._writer.write_all(self._unwritten)
        self._unwritten.clear()

    def close(self) -> None:
        self._writer.close()


class TensorBoard:
    """Event files in `tensorboard/` of the run directory; one event holds all scalars of a step, which is cheap."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases; a resumed run directory continues the same online run."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], project: str, experiment: str) -> None:
        wandb = import_module("wandb")

        self._run = wandb.init(
            project=project,
            name=experiment,
            config=dict(config),
            dir=str(run_dir),
            id=_stable_id(run_dir),
            resume="allow",
            settings=wandb.Settings(login_timeout=30),  # a question nobody answers must not hold up the run
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow; without MLFLOW_TRACKING_URI it writes below the run directory."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], project: str, experiment: str) -> None:
        mlflow = import_module("mlflow")

        self._mlflow = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{(run_dir / 'mlflow.db').resolve()}")
        mlflow.set_experiment(project)
        mlflow.start_run(run_name=experiment)
        leaves = {name: str(value)[:500] for name, value in _leaves(config)}  # MLflow's limit on a parameter's length
        mlflow.log_params(leaves)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Trackio:
    """Trackio (local-first, Hugging Face)."""

    def __init__(self, config: Mapping[str, Any], project: str, experiment: str) -> None:
        trackio = import_module("trackio")

        self._trackio = trackio
        trackio.init(project=project, name=experiment, config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


class SwanLab:
    """SwanLab."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], project: str, experiment: str) -> None:
        swanlab = import_module("swanlab")

        self._swanlab = swanlab
        swanlab.init(project=project, experiment_name=experiment, config=dict(config), logdir=str(run_dir / "swanlab"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


class ClearML:
    """ClearML; the first part of a metric's name is the plot, the rest the series."""

    def __init__(self, config: Mapping[str, Any], project: str, experiment: str) -> None:
        clearml = import_module("clearml")

        self._task = clearml.Task.init(project_name=project, task_name=experiment, continue_last_task=True)
        self._task.connect_configuration(dict(config), name="config")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            self._task.get_logger().report_scalar(title, series or title, value, iteration=step)

    def close(self) -> None:
        self._task.close()


Opener = Callable[[Path, Mapping[str, Any], str, str], Tracker]
OPENERS: dict[str, Opener] = {
    "console": lambda run_dir, config, project, experiment: Console(),
    "jsonl": lambda run_dir, config, project, experiment: Jsonl(run_dir),
    "tensorboard": lambda run_dir, config, project, experiment: TensorBoard(run_dir),
    "wandb": WandB,
    "mlflow": Mlflow,
    "trackio": lambda run_dir, config, project, experiment: Trackio(config, project, experiment),
    "swanlab": SwanLab,
    "clearml": lambda run_dir, config, project, experiment: ClearML(config, project, experiment),
}


class Trackers:
    """All trackers of a run. JSONL is always among them.

    A tracker that cannot be imported, reached or written to is reported once and never stops the run; after
    `GIVE_UP_AFTER` failures in a row it is left out, except JSONL, the run's own record. An unknown name is an error at
    once, because it is a typing error.
    """

    def __init__(self, names: list[str], run_dir: Path | str, config: Mapping[str, Any]) -> None:
        unknown = [name for name in names if name not in OPENERS]
        if unknown:
            raise ValueError(f"unknown tracker {unknown[0]!r} in trainer.logger; known are {', '.join(OPENERS)}")
        run_dir = Path(run_dir)
        self._failures: dict[str, int] = {}
        self._open: dict[str, Tracker] = {}
        for name in dict.fromkeys([RECORD, *names]):
            self._guarded(name, partial(self._open_one, name, run_dir, config))

    @property
    def active(self) -> list[str]:
        """The trackers that opened and have not been given up."""
        return list(self._open)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's scalars to every tracker."""
        for name, tracker in list(self._open.items()):
            self._guarded(name, partial(tracker.log, step, metrics))
            if name != RECORD and self._failures.get(name, 0) >= GIVE_UP_AFTER:
                log.warning("tracker %s failed %d times in a row and is left out", name, GIVE_UP_AFTER)
                del self._open[name]

    def close(self) -> None:
        for name, tracker in self._open.items():
            self._guarded(name, tracker.close)
        self._open = {}

    def _open_one(self, name: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        trainer = config.get("trainer", {})
        project = trainer.get("project_name") or "megatron_dapo"
        experiment = trainer.get("experiment_name") or run_dir.name
        self._open[name] = OPENERS[name](run_dir, config, project, experiment)

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a tracker's library may raise anything, and none of it is worth a training run
            if name not in self._failures:
                log.warning("tracker %s: %s: %s. The run goes on without it.", name, type(error).__name__, error)
            self._failures[name] = self._failures.get(name, 0) + 1
        else:
            if name in self._failures:
                self._failures[name] = 0


def _shown(value: float, form: str) -> str:
    return form.format(value) if value else "0"  # not -0.00e+00


def _stable_id(run_dir: Path) -> str:
    file = run_dir / "tracker_id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text().strip()


def _leaves(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found
