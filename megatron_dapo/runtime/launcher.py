"""Starts the ranks of one machine as torchrun would, or a driver; none outlives the others or this process.

A launch that failed is started again, if so configured: LAUNCH_ATTEMPT counts, LAUNCH_TIME is when the first began.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from megatron_dapo.errors import UserError
from megatron_dapo.runtime.failure import EXIT_USER_ERROR

FINAL_CODES = (0, EXIT_USER_ERROR, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # done, told what to mend, or stopped
GRACE_SECONDS = 15.0  # what the ranks get to leave by themselves after one of them failed
_PR_SET_PDEATHSIG = 1


def launch(module: str, arguments: Sequence[str], world_size: int, *, port: int | None = None) -> int:
    """Runs `python -m module arguments` on `world_size` ranks and returns the first non-zero exit code, else 0."""
    address = free_port() if port is None else _checked_port(port)
    threads = max(1, len(os.sched_getaffinity(0)) // world_size)
    common = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(address),
    }
    environments = [
        {"OMP_NUM_THREADS": str(threads), **os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(world_size)
    ]
    return _run(module, arguments, environments)


def launch_driver(module: str, arguments: Sequence[str]) -> int:
    """Runs `python -m module arguments` once, as the driver of ranks that it has started elsewhere."""
    return _run(module, arguments, [dict(os.environ)])


def with_restarts(start: Callable[[], int], restarts: int) -> int:
    """Calls `start` until it returns a final exit code, at most `restarts` further times."""
    os.environ["LAUNCH_TIME"] = str(time.time())
    for attempt in range(restarts + 1):
        os.environ["LAUNCH_ATTEMPT"] = str(attempt)
        code = start()
        if code in FINAL_CODES or attempt == restarts:
            break
        print(f"failed, exit code {code}; restart {attempt + 1} of {restarts}", file=sys.stderr, flush=True)
    return code


def _run(module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    ranks = [_start(module, arguments, environment) for environment in environments]
    previous = {number: signal.signal(number, lambda number, _: _forward(ranks, number)) for number in _FORWARDED}
    try:
        return _wait(ranks)
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # with its helpers: a rank that was killed could not end them
            rank.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


_FORWARDED = (signal.SIGINT, signal.SIGTERM)


def _forward(ranks: Sequence[subprocess.Popen], number: int) -> None:
    """To rank 0 only: it finishes the step, saves and tells the others."""
    if ranks[0].poll() is None:
        ranks[0].send_signal(number)


def _start(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        preexec_fn=_die_with_parent,
        start_new_session=True,  # the terminal's Ctrl-C reaches the launcher alone, which forwards it
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(ranks: Sequence[subprocess.Popen]) -> int:
    """Until all are done, or one failed and the grace period is over."""
    deadline: float | None = None
    first_failure = 0
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed and deadline is None:
            first_failure, deadline = failed[0], time.monotonic() + GRACE_SECONDS
        if all(code is not None for code in codes) or (deadline is not None and time.monotonic() > deadline):
            return abs(first_failure)
        time.sleep(0.05)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _checked_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"trainer.master_port={port}: {error.strerror}. Choose another port or leave it out to get a free one."
            ) from error
    return port
