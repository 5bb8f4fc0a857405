"""The record of a run survives crashes, non-finite numbers and readers that come early."""

import json
import math
import multiprocessing
import os
import signal

from megatron_dapo.metrics import JsonlWriter, read_jsonl
from megatron_dapo.report.run_files import read_rows


def test_one_object_per_line_and_non_finite_floats(tmp_path):
    writer = JsonlWriter(tmp_path / "deep" / "m.jsonl")
    writer.write({"step": 1, "loss": math.nan, "a": [math.inf, {"b": -math.inf}]})
    writer.close()
    assert json.loads((tmp_path / "deep" / "m.jsonl").read_text()) == {
        "step": 1,
        "loss": "NaN",
        "a": ["Infinity", {"b": "-Infinity"}],
    }


def test_a_torn_last_line_is_not_read_and_is_removed_on_the_next_start(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "los')
    assert read_jsonl(path) == [{"step": 1}]
    writer = JsonlWriter(path)
    writer.write({"step": 2})
    writer.close()
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_torn_line_longer_than_a_block_and_a_file_without_any_whole_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"x": "' + "y" * 200_000)
    JsonlWriter(path).close()
    assert read_jsonl(path) == [{"step": 1}]
    path.write_text('{"x": "' + "y" * 200_000)
    JsonlWriter(path).close()
    assert path.read_bytes() == b""


def test_a_write_that_failed_halfway_costs_its_own_line_only(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')  # what a full disk leaves
    writer.write({"step": 3})
    writer.close()
    assert path.read_text().splitlines()[1:] == ['{"step": 2, "lo', '{"step": 3}']
    assert read_jsonl(path) == read_rows(path) == [{"step": 1}, {"step": 3}] and "line 2" in caplog.text


def write_and_die(path) -> None:
    writer = JsonlWriter(path)
    for step in range(20):
        writer.write({"step": step})
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_only_whole_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    process = multiprocessing.get_context("fork").Process(target=write_and_die, args=(path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert [row["step"] for row in read_jsonl(path)] == list(range(20))
