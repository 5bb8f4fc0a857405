"""Chaos: a streaming run of the smallest model in which something is killed with SIGKILL at one point after another.

    python -m tests.e2e.chaos DIRECTORY [--points NAME …] [--table docs/chaos.md]

The run is started again after every kill and goes on from its last checkpoint. At every checkpoint the
ledger is audited: each prompt drawn so far was closed exactly once or is outstanding. Each point kills once, in the order
of the list; when the last has been survived, the run stops. Called again, it goes on with what is left.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import psutil

STATE, ROWS = "chaos_armed.json", "chaos.jsonl"


@dataclass(frozen=True)
class Point:
    """Kill `victim` at the `nth` time that `where` is passed in one process."""

    name: str
    where: str  # "stage:NAME:enter|exit" or "call:CLASS.METHOD:before|after"
    victim: str = "trainer"
    nth: int = 2


POINTS = (
    *(Point(f"trainer enters {stage}", f"stage:{stage}:enter") for stage in ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "save_checkpoint")),
    *(Point(f"trainer leaves {stage}", f"stage:{stage}:exit") for stage in ("gen", "update_actor", "update_weights")),
    Point("trainer leaves save_checkpoint", "stage:save_checkpoint:exit", nth=1),
    Point("while saving: the ranks have written, the queue not", "call:Rollouts.save:before", nth=1),
    Point("while saving: the ledger is written, the queue not", "call:Queue.snapshot:before", nth=1),
    Point("while saving: all is written, not committed", "call:CheckpointStore.commit:before", nth=1),
    Point("while saving: committed, old ones not pruned", "call:CheckpointStore._prune:before", nth=1),
    Point("while restoring: before the queue", "call:Queue.restore:before", nth=1),
    Point("while restoring: the queue is back", "call:Queue.restore:after", nth=1),
    Point("while restoring: prompts are sent again", "call:Rollouts.restore:after", nth=1),
    Point("trainer has drawn prompts, not sent", "call:Feed.send:before"),
    Point("trainer closes a draw", "call:Ledger.close:after", nth=3),
    Point("samples are stored, not scored", "call:RewardManager.score:before", nth=3),
    Point("a group's last sample is in, its status not", "call:Feed.settled:before", nth=5),
    Point("engine while generating", "call:Feed.settled:before", "engine", nth=5),
    Point("engine during a push", "stage:update_weights:enter", "engine"),
    Point("engine while the trainer trains", "stage:update_actor:enter", "engine"),
    Point("reward worker", "stage:gen:enter", "reward"),
    Point("queue storage unit while generating", "stage:gen:enter", "storage", nth=3),
    Point("queue storage unit during a save", "call:Queue.snapshot:before", "storage", nth=1),
    Point("queue controller", "stage:gen:enter", "controller", nth=3),
)  # fmt: skip


class Chaos:
    """Inside the trainer's process: kills at the armed point, notes what became of it at the next checkpoint."""

    def __init__(self, directory: Path, points: list[str]) -> None:
        self.directory, self.points = directory, points
        self.passed: dict[str, int] = {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        file = self.directory / ROWS
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def armed(self) -> Point | None:
        """The next point, once the kill before has been survived; one inside a restore strikes before that."""
        rows = self.rows
        left = [name for name in self.points if name not in {row["point"] for row in rows}]
        if not left or (rows and not rows[-1]["survived"] and "restoring" not in left[0]):
            return None
        return next(point for point in POINTS if point.name == left[0])

    def passes(self, place: str) -> None:
        self.passed[place] = self.passed.get(place, 0) + 1
        point = self.armed()
        if point is None or point.where != place or self.passed[place] < point.nth:
            return
        row = {"point": point.name, "victim": point.victim, "killed": time.time(), "survived": False}
        with (self.directory / ROWS).open("a") as file:
            file.write(json.dumps(row) + "\n")
        pids = victims(point.victim)
        assert pids, f"there is no {point.victim} to kill"
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.passed.clear()

    def checkpointed(self, step: int) -> None:
        """Everything before this checkpoint has been survived, if the audit agrees."""
        from megatron_dapo.trainers.ledger import audit_checkpoint

        problems = audit_checkpoint(self.directory, step)
        rows = self.rows
        for row in rows:
            if not row["survived"]:
                row |= {
                    "survived": not problems,
                    "problems": problems,
                    "step": step,
                    "seconds": round(time.time() - row["killed"], 1),
                }
        (self.directory / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        if problems:
            print("AUDIT", problems, flush=True)
        if len(rows) == len(self.points) and all(row["survived"] for row in rows):
            os.kill(os.getpid(), signal.SIGTERM)  # the run takes another step, saves and stops


def victims(kind: str) -> list[int]:
    """Process ids: ourselves, one rollout engine, the verifiers, a storage unit, the controller."""
    me = psutil.Process()
    if kind == "trainer":
        return [me.pid]
    named = [(child.pid, " ".join(child.cmdline())) for child in me.children(recursive=True)]
    pattern = {
        "engine": "rollout.server",
        "reward": "megatron_dapo.rewards",
        "storage": "SimpleStorageUnit",
        "controller": "TransferQueueController",
    }[kind]
    return [pid for pid, name in named if pattern in name][:1]


def install(chaos: Chaos) -> None:
    """Wraps the places that the points name. Nothing of this is in the package."""
    from megatron_dapo.metrics import Timer
    from megatron_dapo.rewards import RewardManager
    from megatron_dapo.runtime.queue import Queue
    from megatron_dapo.trainers.checkpoints import CheckpointStore
    from megatron_dapo.trainers.feed import Feed
    from megatron_dapo.trainers.ledger import Ledger
    from megatron_dapo.trainers.rollouts import Rollouts
    from megatron_dapo.trainers.run import Run

    classes = {c.__name__: c for c in (Queue, Feed, Ledger, Rollouts, CheckpointStore, RewardManager)}
    for place in {point.where for point in POINTS if point.where.startswith("call:")}:
        _, method, when = place.split(":")
        owner, name = method.split(".")
        setattr(classes[owner], name, passing(classes[owner].__dict__[name], place, when, chaos))
    stage, save = Timer.stage, Run.save

    @contextmanager
    def watched(self: Timer, name: str) -> Iterator[None]:
        chaos.passes(f"stage:{name}:enter")
        with stage(self, name):
            yield
        chaos.passes(f"stage:{name}:exit")

    def saved(self: Run) -> Path:
        path = save(self)
        chaos.checkpointed(self.step)
        return path

    Timer.stage, Run.save = watched, saved  # type: ignore[method-assign,assignment]


def passing(function: Callable[..., Any], place: str, when: str, chaos: Chaos) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            chaos.passes(place)
        result = function(*args, **kwargs)
        if when == "after":
            chaos.passes(place)
        return result

    return wrapped


def torment(directory: Path, overrides: list[str], points: list[str]) -> int:
    """The whole run, started again after every death; returns its last exit code (143: stopped by itself at the end)."""
    from megatron_dapo.runtime.launcher import launch

    directory.mkdir(parents=True, exist_ok=True)
    (directory / STATE).write_text(json.dumps(points))
    os.environ["CHAOS"] = str(directory)
    endless = ("trainer.total_training_steps=100000", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=2")
    words = [*overrides, *endless, f"trainer.default_local_dir={directory}"]
    code = 1
    for _ in range(len(points) + 3):
        if (code := launch("tests.e2e.chaos", words, 1)) in (0, 2, 143):
            break
    return code


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| # | killed | victim | next checkpoint | seconds until it | ledger |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for i, row in enumerate(rows, 1):
        verdict = "each draw once" if row["survived"] else f"**{row.get('problems', 'not survived')}**"
        lines.append(
            f"| {i} | {row['point']} | {row['victim']} | step {row.get('step', '-')} | {row.get('seconds', '-')} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def rank() -> None:
    """The program of the tormented rank."""
    from megatron_dapo.parallel import host_cuda

    host_cuda.install()
    directory = Path(os.environ["CHAOS"])
    install(Chaos(directory, json.loads((directory / STATE).read_text())))
    from megatron_dapo.train import main

    main()


def cli() -> None:
    from megatron_dapo.cli.demo import Demo, write_inputs
    from tests.e2e.conftest import Line

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--points", nargs="*", default=[point.name for point in POINTS])
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    line = Line(Demo(args.directory / "inputs"))
    if not line.demo.data.exists():
        write_inputs(line.demo)
    torment(args.directory / "run", [*line.overrides(args.directory / "run"), *SMALL], args.points)
    rows = Chaos(args.directory / "run", args.points).rows
    text = table(rows)
    print(text)
    if args.table:
        args.table.write_text(HEAD.format(n=len(rows), survived=sum(row["survived"] for row in rows)) + text)
    sys.exit(0 if all(row["survived"] for row in rows) and len(rows) >= len(args.points) else 1)


SMALL = (
    *("trainer.mode=separate_async", "parallel.world_size=1", "parallel.expert=1", "rollout.engines=2"),
    *("rollout.kv_cache_gb=0.125", "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"),
    *(f"reward.custom_function.path={Path(__file__).with_name('chaos_reward.py')}", "reward.num_workers=1"),
)
HEAD = """# Chaos

What `python -m tests.e2e.chaos DIRECTORY --table docs/chaos.md` did to a run of the demo model in `separate_async` mode
with two engines: {n} times SIGKILL, {survived} survived. After each the run started itself again from its last checkpoint,
or went on where only a helper died, and the audit of the next checkpoint's ledger found each draw closed exactly once or
outstanding.

"""

if __name__ == "__main__":
    rank() if "RANK" in os.environ else cli()
