"""Inputs of the end-to-end tests, made once: arithmetic problems, a tokenizer, and a tiny random model."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_dapo.cli.demo import Demo, write_inputs
from megatron_dapo.metrics import METRICS_FILE, read_jsonl
from megatron_dapo.runtime.launcher import launch


@dataclass(frozen=True)
class Line:
    """The demo's inputs, and a way to run a program of ours on them as a user would."""

    demo: Demo

    def overrides(self, directory: Path, *more: str) -> list[str]:
        return [
            "recipe=demo",
            f"model.path={self.demo.init}",
            f"data.train_files=[{self.demo.data}/train.parquet]",
            f"data.val_files=[{self.demo.data}/val.parquet]",
            f"trainer.default_local_dir={directory}",
            "data.train_batch_size=4",
            "data.gen_batch_size=4",
            "actor.ppo_mini_batch_size=4",
            "rollout.n=4",
            "data.val_max_samples=16",
            "algorithm.filter_groups.metric=length",  # a random model is never right: its lengths differ
            "algorithm.filter_groups.enable=false",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.val_before_train=false",
            "trainer.export_hf=false",
            *more,
        ]

    def train(self, directory: Path, world: int, *more: str) -> int:
        return launch("megatron_dapo.train", self.overrides(directory, *more), world)

    def start(self, directory: Path, world: int, *more: str, environment: dict | None = None) -> subprocess.Popen:
        """The launcher as a process of its own, to be signalled."""
        words = [f"parallel.world_size={world}", *self.overrides(directory, *more)]
        command = [sys.executable, "-m", "megatron_dapo.cli.main", "train", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.fixture(scope="session")
def line(tmp_path_factory) -> Line:
    demo = replace(Demo(tmp_path_factory.mktemp("line")))
    write_inputs(demo)
    return Line(demo)


@pytest.fixture(scope="session")
def two_ranks(line: Line, tmp_path_factory) -> Path:
    """Two steps on two expert-parallel ranks under torchrun, everything of the actor offloaded while it is not needed."""
    directory = tmp_path_factory.mktemp("two_ranks")
    layout = ("parallel.world_size=2", "parallel.expert=2")
    offload = "actor.offload={param: true, grad: true, optimizer: true}"
    assert line.train(directory, 2, *layout, offload, "trainer.total_training_steps=2") == 0
    return directory


def trained(directory: Path) -> list[dict]:
    """What a run wrote about each step, without what depends on the clock or the machine."""
    rows = read_jsonl(directory / METRICS_FILE)
    volatile = ("timing", "perf/", "push/", "verifier/seconds", "training/total_steps")
    return [{k: v for k, v in row.items() if not k.startswith(volatile)} for row in rows]


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())
