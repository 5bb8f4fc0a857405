"""The live view shows the state of a run, here and over ssh, and ends with it."""

import io
import os
import stat

import pytest
from rich.console import Console

from megatron_dapo.errors import UserError
from megatron_dapo.report import watch
from megatron_dapo.report.health import figures
from megatron_dapo.report.run_files import read_run
from megatron_dapo.report.watch import sparkline
from tests.report.example_run import write_example


def shown(run_dir, width: int = 140, **options) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    watch(run_dir, console=console, **options)
    return console.export_text()


@pytest.mark.parametrize("width", [70, 140])
def test_progress_metrics_stages_and_a_sample(run_dir, width):
    text = shown(run_dir, width, once=True)
    for words in (
        "step 30 of 60",
        "to go",
        "accuracy",
        "entropy",
        "aime-2024/acc/mean@32",
        "update_actor",
        "best of step 30",
    ):
        assert words in text, words
    assert max(len(line) for line in text.splitlines()) <= width


def test_a_finished_run_ends_the_view(tmp_path):
    run = write_example(tmp_path / "run", steps=12)
    config = (run / "config.yaml").read_text().replace("total_training_steps: 42", "total_training_steps: 12")
    (run / "config.yaml").write_text(config)
    text = shown(run, interval=0.01)
    assert "step 12 of 12" in text and "done in" in text


def test_a_run_of_epochs_says_itself_when_it_ends(tmp_path):
    run = write_example(tmp_path / "run", steps=12)
    (run / "config.yaml").write_text("trainer: {total_epochs: 1}")
    assert "step 12 of" not in shown(run, once=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "training/total_steps": 20}\n')
    text = shown(run, once=True)
    assert "step 12 of 20" in text and "to go" in text
    assert figures(read_run(run))[0].before == "of 20"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "training/total_steps": 20}\n')
    assert "step 20 of 20" in shown(run, interval=0.01)  # it returns


def test_an_empty_run_and_a_missing_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert "no step yet" in shown(tmp_path, once=True)
    with pytest.raises(UserError, match="is not a run directory"):
        shown(tmp_path / "nothing", once=True)


def test_names_with_brackets_are_not_taken_for_markup(tmp_path):
    run = write_example(tmp_path / "run", name="[red]lr=1e-6[/red]", steps=3)
    assert "[red]lr=1e-6[/red]" in shown(run, once=True)


def test_a_remote_run_is_read_over_ssh(run_dir, tmp_path, monkeypatch):
    fake = tmp_path / "ssh"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = me@node7 ] || { echo "no such host" >&2; exit 255; }\nshift; exec sh -c "$*"\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "best of step 30" in shown(f"me@node7:{run_dir}", once=True)
    with pytest.raises(UserError, match=r"cannot read other:/x with ssh: no such host"):
        shown("other:/x", once=True)


def test_sparkline():
    assert sparkline([0.0, 1.0], 10) == "▁█" and sparkline([2.0, 2.0], 10) == "▄▄" and sparkline([], 10) == ""
    assert len(sparkline(list(range(1000)), 20)) == 20 and sparkline([float("nan"), 1.0], 5) == "▄"
