"""One verifier process: takes jobs from its socket, answers each, and never outlives a job that hangs.

Started by `pool` as `python -m megatron_dapo.rewards.worker FD`. The first message is a `Setup`; then come lists of
`(job id, kind, arguments)`; every job is answered by `(job id, "ok" | "error", value)`.
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

MEMORY_BYTES = 4 << 30  # address space of a worker that runs built-in code; a user's function has no limit
SELF_DESTRUCT_S = 5.0  # a worker whose parent died or lost interest ends this long after its job's deadline

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
    except (RewardError, ImportError) as error:
        channel.send(sock, ("error", str(error)))
        return
    channel.send(sock, ("ready", setup.custom is not None and inspect.iscoroutinefunction(handlers["custom"])))
    while True:
        try:
            jobs: list[Job] = channel.receive(sock)
        except EOFError:
            return
        if inspect.iscoroutinefunction(handlers[jobs[0][1]]):
            signal.setitimer(signal.ITIMER_REAL, setup.timeout_s + SELF_DESTRUCT_S)
            asyncio.run(_run_together(sock, jobs, handlers, setup.timeout_s))
        else:
            for job in jobs:
                signal.setitimer(signal.ITIMER_REAL, setup.timeout_s + SELF_DESTRUCT_S)
                _answer(sock, job[0], *_run(job, handlers))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _handlers(setup: Setup) -> dict[str, Callable[..., Any]]:
    """The functions by kind. A worker has a user's function or the built-in ones, never both."""
    if setup.custom is not None:
        function, kwargs = setup.custom.load(), dict(setup.custom.kwargs)
        if inspect.iscoroutinefunction(function):

            async def call_async(*arguments: Any) -> Any:
                return await function(**_named(arguments), **kwargs)

            return {"custom": call_async}
        return {"custom": lambda *arguments: function(**_named(arguments), **kwargs)}
    from megatron_dapo.rewards import remote

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    return remote.HANDLERS


def _named(arguments: tuple) -> dict[str, Any]:
    return dict(zip(("data_source", "solution_str", "ground_truth", "extra_info"), arguments, strict=True))


def _run(job: Job, handlers: dict[str, Callable[..., Any]]) -> tuple[str, Any]:
    _, kind, arguments = job
    try:
        return "ok", handlers[kind](*arguments)
    except Exception:  # a user's function may raise anything; the parent counts it and decides
        return "error", traceback.format_exc(limit=-3)


async def _run_together(
    sock: socket.socket, jobs: list[Job], handlers: dict[str, Callable[..., Any]], timeout_s: float
) -> None:
    async def one(job: Job) -> None:
        ident, kind, arguments = job
        try:
            answer = "ok", await asyncio.wait_for(handlers[kind](*arguments), timeout_s)
        except TimeoutError:
            answer = "timeout", f"no verdict within {timeout_s:g} s"
        except Exception:
            answer = "error", traceback.format_exc(limit=-3)
        _answer(sock, ident, *answer)

    await asyncio.gather(*(one(job) for job in jobs))


def _answer(sock: socket.socket, ident: int, status: str, value: Any) -> None:
    try:
        channel.send(sock, (ident, status, value))
    except (TypeError, AttributeError, ValueError) as error:  # what pickle raises for objects it cannot carry
        channel.send(sock, (ident, "error", f"the reward function returned something that cannot be sent: {error}"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
