"""Ranks start together and end together: the code comes back, nobody is left, a taken port is told."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from megatron_dapo.errors import UserError
from megatron_dapo.runtime import launcher
from tests.processes import process_exists


@pytest.fixture
def program(tmp_path, monkeypatch):
    def write(text: str) -> str:
        (tmp_path / "rank_program.py").write_text(textwrap.dedent(text))
        return "rank_program"

    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return write


def test_every_rank_knows_its_place(program, tmp_path):
    module = program(
        """
        import os, pathlib, sys
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
        pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(os.environ[n] for n in names))
        """
    )
    assert launcher.launch(module, [str(tmp_path)], 3) == 0
    assert [(tmp_path / str(r)).read_text() for r in range(3)] == [f"{r} {r} 3 127.0.0.1" for r in range(3)]


def test_one_failing_rank_ends_the_others(program, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.5)
    module = program(
        """
        import os, pathlib, sys, time
        pathlib.Path(sys.argv[1], "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
        sys.exit(7) if os.environ["RANK"] == "1" else time.sleep(600)
        """
    )
    start = time.monotonic()
    assert launcher.launch(module, [str(tmp_path)], 2) == 7
    assert time.monotonic() - start < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid0").read_text()), 0)


def test_a_killed_ranks_helpers_end_with_it(program, tmp_path):
    module = program(
        """
        import os, pathlib, signal, subprocess, sys
        helper = subprocess.Popen(["sleep", "600"])
        pathlib.Path(sys.argv[1], "helper").write_text(str(helper.pid))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert launcher.launch(module, [str(tmp_path)], 1) == signal.SIGKILL
    helper = int((tmp_path / "helper").read_text())
    deadline = time.monotonic() + 5
    while process_exists(helper):
        assert time.monotonic() < deadline, "the helper outlives its rank"
        time.sleep(0.05)


def test_ranks_die_with_a_killed_launcher(program, tmp_path):
    module = program(
        """
        import os, pathlib, sys, time
        pathlib.Path(sys.argv[1], "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(600)
        """
    )
    code = f"from megatron_dapo.runtime.launcher import launch; launch({module!r}, [{str(tmp_path)!r}], 2)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: all((tmp_path / f"pid{r}").exists() and (tmp_path / f"pid{r}").read_text() for r in range(2)))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for rank in range(2):
        pid = int((tmp_path / f"pid{rank}").read_text())
        wait_for(lambda pid=pid: gone(pid))


@pytest.mark.parametrize(("codes", "calls", "last"), [
    ([1, 9, 0], 3, 0),  # failed twice, then done
    ([1, 1, 1, 0], 3, 1),  # no more than so often
    ([2, 0], 1, 2),  # the user has something to mend
    ([130, 0], 1, 130),  # stopped on request
])  # fmt: skip
def test_a_failed_launch_is_started_again(codes, calls, last, monkeypatch):
    monkeypatch.delenv("LAUNCH_ATTEMPT", raising=False)
    monkeypatch.delenv("LAUNCH_TIME", raising=False)
    seen = []

    def start() -> int:
        seen.append((os.environ["LAUNCH_ATTEMPT"], os.environ["LAUNCH_TIME"]))
        return codes[len(seen) - 1]

    assert launcher.with_restarts(start, restarts=2) == last
    assert [attempt for attempt, _ in seen] == ["0", "1", "2"][:calls]
    assert len({began for _, began in seen}) == 1


def test_a_taken_port_is_one_clear_error(program):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"{port}.*in use"):
            launcher.launch(program(""), [], 1, port=port)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)
