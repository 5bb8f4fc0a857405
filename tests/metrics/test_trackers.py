"""Trackers get the scalars; none of them can stop a run, and the run says once that one is missing."""

import logging
import sys
import types
from typing import get_args

import pytest

from megatron_dapo.config.trainer import Tracker
from megatron_dapo.metrics import JsonlWriter, Trackers, read_jsonl
from megatron_dapo.metrics.trackers import GIVE_UP_AFTER, OPENERS, Console

CONFIG = {"trainer": {"project_name": "p", "experiment_name": "e"}, "rollout": {"n": 4}}


def test_jsonl_is_always_written_and_the_console_has_one_line(tmp_path, capsys):
    trackers = Trackers(["console"], tmp_path, CONFIG)
    trackers.log(1, {"critic/score/mean": 0.5, "perf/throughput": 100.0, "val-core/aime/acc/mean@1": 0.25})
    trackers.close()
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["critic/score/mean"] == 0.5
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "reward 0.500" in out and "val-core/aime/acc/mean@1 0.250" in out


def test_the_console_fits_every_kind_of_run_and_zero_is_zero(tmp_path, capsys):
    trackers = Trackers(["console"], tmp_path, CONFIG)
    trackers.log(1, {"actor/ppo_kl": -0.0, "actor/grad_norm": 0.25})
    trackers.log(2, {"sft/loss": 1.5, "sft/val_loss": 1.25, "sft/grad_norm": 2.0, "perf/time_per_step": 0.5})
    assert capsys.readouterr().out.splitlines() == [
        "step     1 | kl 0 | grad 0.25",
        "step     2 | loss 1.5000 | val loss 1.2500 | grad 2.00 | s 0.5",
    ]


def test_the_console_says_how_far_it_is_and_how_long_it_will_take(capsys):
    console = Console(clock=iter([10.0, 14.0]).__next__)
    for step in (3, 5):
        console.log(step, {"training/total_steps": 50, "actor/grad_norm": 0.25})
    console.close()
    assert capsys.readouterr().out.splitlines() == [
        "step     3/50 | grad 0.25",
        "step     5/50 | grad 0.25 | eta 0:01:30",
    ]


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"unknown tracker 'wand'.*wandb"):
        Trackers(["wand"], tmp_path, CONFIG)


def test_tensorboard_reads_back(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = Trackers(["tensorboard"], tmp_path, CONFIG)
    for step in (1, 2):
        trackers.log(step, {"actor/entropy": step / 2})
    trackers.close()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/entropy")] == [(1, 0.5), (2, 1.0)]


def test_a_missing_library_is_said_once_and_the_run_goes_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", None)  # importing it now fails as if it were not installed
    with caplog.at_level(logging.WARNING):
        trackers = Trackers(["swanlab"], tmp_path, CONFIG)
        trackers.log(1, {"a": 1.0})
        trackers.close()
    assert trackers.active == [] and len(caplog.records) == 1 and "swanlab" in caplog.text
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1.0}]


def test_a_failing_tracker_is_said_once_and_left_out_in_the_end(tmp_path, caplog, monkeypatch):
    class Broken:
        calls = 0

        def log(self, step, metrics):
            Broken.calls += 1
            raise ConnectionError("offline")

        def close(self):
            raise ConnectionError("offline")

    monkeypatch.setitem(OPENERS, "trackio", lambda *_: Broken())
    with caplog.at_level(logging.WARNING):
        trackers = Trackers(["trackio"], tmp_path, CONFIG)
        for step in range(6):
            trackers.log(step, {"a": 1.0})
        trackers.close()
    assert Broken.calls == GIVE_UP_AFTER and trackers.active == []
    assert [r.message for r in caplog.records] == [
        "tracker trackio: ConnectionError: offline. The run goes on without it.",
        "tracker trackio failed 3 times in a row and is left out",
    ]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 6


def test_the_record_is_never_given_up_and_catches_up(tmp_path, monkeypatch):
    write, broken = JsonlWriter.write_all, [True] * (GIVE_UP_AFTER + 2)

    def full_disk(self, rows):
        if broken:
            broken.pop()
            raise OSError(28, "No space left on device")
        write(self, rows)

    monkeypatch.setattr(JsonlWriter, "write_all", full_disk)
    trackers = Trackers([], tmp_path, CONFIG)
    for step in range(8):
        trackers.log(step, {"a": 1.0})
    trackers.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(8))


def test_the_configuration_offers_every_tracker():
    assert set(get_args(Tracker)) == set(OPENERS)


class Recorder:
    """A library that notes what is called."""

    def __init__(self, calls, name=""):
        self._calls, self._name = calls, name

    def __getattr__(self, name):
        return Recorder(self._calls, f"{self._name}.{name}".strip("."))

    def __call__(self, *args, **kwargs):
        self._calls.append((self._name, args, kwargs))
        return self


@pytest.mark.parametrize(
    ("name", "logged"),
    [
        ("swanlab", ("log", ({"actor/entropy": 0.5},), {"step": 3})),
        ("clearml", ("Task.init.get_logger.report_scalar", ("actor", "entropy", 0.5), {"iteration": 3})),
    ],
)
def test_what_a_library_that_is_not_here_would_get(name, logged, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, name, Recorder(calls))
    trackers = Trackers([name], tmp_path, CONFIG)
    trackers.log(3, {"actor/entropy": 0.5})
    assert logged in calls and trackers.active == ["jsonl", name]
    trackers.close()


def test_wandb_gets_a_stable_id_so_that_a_resumed_run_continues(tmp_path, monkeypatch):
    calls = []
    fake = types.SimpleNamespace(
        Settings=lambda **kw: kw,
        init=lambda **kw: calls.append(kw) or types.SimpleNamespace(log=lambda *a, **k: None, finish=lambda: None),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        Trackers(["wandb"], tmp_path, CONFIG).close()
    assert calls[0]["id"] == calls[1]["id"] and calls[0]["resume"] == "allow" and calls[0]["project"] == "p"
