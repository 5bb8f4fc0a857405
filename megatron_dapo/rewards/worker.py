"""One verifier process: takes jobs from its socket, answers each, and never outlives a job that hangs.

Started by `pool` as `python -m megatron_dapo.rewards.worker FD`. The first message is a `Setup`; then come lists of
`(job id, kind, arguments)`; every job is answered by `(job id, "ok" | "error" | "timeout", value)`. Imports that a job
needs once are framed by the messages `(CLOCK, "stop", None)` and `(CLOCK, "go", None)`: they are not the job's time.
"""

import asyncio
import inspect
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from megatron_dapo.rewards import channel
from megatron_dapo.rewards.custom import CustomFunction
from megatron_dapo.rewards.errors import RewardError
from megatron_dapo.rewards.remote import BUILT_IN, Handler

MEMORY_BYTES = 4 << 30  # address space of a worker that runs built-in code; a user's function has no limit
START_TIMEOUT_S = 120.0  # for imports on a busy machine
SELF_DESTRUCT_S = 5.0  # a worker whose parent died or lost interest ends this long after its job's deadline

CLOCK = -1  # the job id of messages about time

Job = tuple[int, str, tuple]


@dataclass(frozen=True)
class Setup:
    """What a worker must know before its first job."""

    timeout_s: float
    custom: CustomFunction | None = None
    cpu_budget_s: float = inf  # a job killed at its deadline after so much computing would do no better a second time


def main(fd: int) -> None:
    """Serve until the parent closes the socket."""
    sock = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business; it closes the socket
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends us even where Python cannot run a handler
    setup: Setup = channel.receive(sock)
    try:
        handlers = _handlers(setup)
    except RewardError as error:
        channel.send(sock, ("error", str(error)))
        return
    asynchronous = setup.custom is not None and inspect.iscoroutinefunction(handlers["custom"].run)
    channel.send(sock, ("ready", asynchronous))
    warm: set[str] = set()
    while True:
        try:
            jobs: list[Job] = channel.receive(sock)
        except EOFError:
            return
        if asynchronous:
            _self_destruct_in(setup.timeout_s)
            asyncio.run(_run_together(sock, jobs, handlers["custom"].run, setup.timeout_s))
        else:
            for ident, kind, arguments in jobs:
                if kind not in warm:
                    warm.add(kind)
                    _warm_up(sock, handlers[kind])
                _self_destruct_in(setup.timeout_s)
                _answer(sock, ident, *_run(handlers[kind].run, arguments))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _self_destruct_in(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds + SELF_DESTRUCT_S)


def _warm_up(sock: socket.socket, handler: Handler) -> None:
    if handler.warm is not None:
        _self_destruct_in(START_TIMEOUT_S)
        channel.send(sock, (CLOCK, "stop", None))
        handler.warm()
        channel.send(sock, (CLOCK, "go", None))


def _handlers(setup: Setup) -> dict[str, Handler]:
    """The functions by kind. A worker has a user's function or the built-in ones, never both."""
    if setup.custom is None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        return BUILT_IN
    function, kwargs = setup.custom.load(), dict(setup.custom.kwargs)
    if inspect.iscoroutinefunction(function):

        async def call_async(*arguments: Any) -> Any:
            return await function(**_named(arguments), **kwargs)

        return {"custom": Handler(call_async)}
    return {"custom": Handler(lambda *arguments: function(**_named(arguments), **kwargs))}


def _named(arguments: tuple) -> dict[str, Any]:
    return dict(zip(("data_source", "solution_str", "ground_truth", "extra_info"), arguments, strict=True))


def _run(function: Callable[..., Any], arguments: tuple) -> tuple[str, Any]:
    try:
        return "ok", function(*arguments)
    except Exception:  # a user's function may raise anything; the parent counts it and decides
        return "error", traceback.format_exc(limit=-3)


async def _run_together(sock: socket.socket, jobs: list[Job], function: Callable[..., Any], timeout_s: float) -> None:
    async def one(job: Job) -> None:
        try:
            answer = "ok", await asyncio.wait_for(function(*job[2]), timeout_s)
        except TimeoutError:
            answer = "timeout", f"no verdict within {timeout_s:g} s"
        except Exception:
            answer = "error", traceback.format_exc(limit=-3)
        _answer(sock, job[0], *answer)

    await asyncio.gather(*(one(job) for job in jobs))


def _answer(sock: socket.socket, ident: int, status: str, value: Any) -> None:
    try:
        channel.send(sock, (ident, status, value))
    except (TypeError, AttributeError, ValueError) as error:  # what pickle raises for objects it cannot carry
        channel.send(sock, (ident, "error", f"the reward function returned something that cannot be sent: {error}"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
