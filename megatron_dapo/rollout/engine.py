"""A rollout engine seen from the trainer: a child process with vLLM that generates, takes weights, and may die."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from megatron_dapo.models.slices import Layout
from megatron_dapo.resharding.memory import host_identity
from megatron_dapo.resharding.push import Target
from megatron_dapo.rollout.client import EngineClient, EngineDied, EngineError
from megatron_dapo.rollout.processes import end_group, remove_shared_memory
from megatron_dapo.rollout.spec import EngineSpec, environment
from megatron_dapo.rollout.wire import unpack_generations

POLL_SECONDS = 0.5  # how long a silent death (pipe still held open by a worker) can go unnoticed


class RolloutEngine(EngineClient):
    """One vLLM engine in a process of this host; a reader thread hands out the answers."""

    def __init__(self, spec: EngineSpec, process: subprocess.Popen[bytes], connection: Connection) -> None:
        super().__init__(spec)
        self._process = process
        self._connection = connection
        self._sending = threading.Lock()
        self._tickets = count()
        self._answers: dict[int, Future[Any]] = {}
        self._ready: Future[dict[str, Any]] = Future()
        self._layouts: list[tuple[Layout, dict[str, str], tuple[str, ...]]] | None = None
        threading.Thread(target=self._read, name=f"{spec.name}-reader", daemon=True).start()

    @classmethod
    def start(cls, spec: EngineSpec, on_cpu: bool | None = None) -> "RolloutEngine":
        """Start the process and return at once; `wait_ready` says when it can generate."""
        if on_cpu is None:
            import torch

            on_cpu = not torch.cuda.is_available()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "megatron_dapo.rollout.server", str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            command,
            env=environment(spec, on_cpu, os.environ),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # terminal signals are ours to handle; and its workers can be ended as one group
        )
        theirs.close()
        connection = Connection(ours.detach())
        connection.send(spec)
        return cls(spec, process, connection)

    def restart(self) -> "RolloutEngine":
        """A new process in place of this one."""
        self.close()
        return RolloutEngine.start(self.spec)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._death is None and self._process.poll() is None

    def wait_ready(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until vLLM has loaded. Raises EngineDied if it could not start, TimeoutError after `timeout` seconds."""
        return self._ready.result(timeout)

    def layouts(self) -> list[Layout]:
        """What each tensor-parallel rank stores, read from its live model."""
        return [slices for slices, _, _ in self._described()]

    def dtypes(self) -> dict[str, str]:
        """The dtype of every storage that `layouts` names."""
        return self._described()[0][1]

    def full_tensors(self) -> tuple[str, ...]:
        """HF tensors that must be sent whole, because vLLM keeps them in a layer the bridge does not know."""
        return self._described()[0][2]

    def target(self) -> Target:
        """What a push must know of this engine."""
        layouts, whole = tuple(self.layouts()), self.full_tensors()
        return Target(host_identity(), layouts, self.dtypes(), whole, colocated=self.spec.sleeps)

    def _described(self) -> list[tuple[Layout, dict[str, str], tuple[str, ...]]]:
        if self._layouts is None:
            self._layouts = self._call("layouts").result()
        return self._layouts

    def close(self, grace_seconds: float = 10.0) -> None:
        """End the process and its workers, politely first. May be called twice."""
        self._closing = True
        try:
            with self._sending:
                self._connection.send(("close", None, ()))
            self._process.wait(grace_seconds)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._kill_group()
        self._process.wait()

    def _call(self, command: str, *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._state:
            self._raise_if_dead()
            ticket = next(self._tickets)
            self._answers[ticket] = future
        try:
            with self._sending:
                self._connection.send((command, ticket, arguments))
        except OSError:
            pass  # the reader finds out why and fails the future
        return future

    def _read(self) -> None:
        try:
            while self._process.poll() is None or self._connection.poll(0):
                if self._connection.poll(POLL_SECONDS):
                    self._receive(*self._connection.recv())
        except (EOFError, OSError):
            pass
        self._bury("")

    def _receive(self, kind: str, ticket: int, payload: Any) -> None:
        if kind == "results":
            for generation in unpack_generations(payload):
                with self._state:
                    future = self._generations.pop(generation.request_id)
                future.set_result(generation)
        elif kind == "answer":
            self._answers.pop(ticket).set_result(payload)
        elif kind == "error":
            message, trace = payload
            error = EngineError(f"{self.spec.name}: {message}")
            error.add_note(f"in the engine's process:\n{trace}")
            self._answers.pop(ticket).set_exception(error)
        elif kind == "ready":
            self._ready.set_result(payload)
        elif kind == "died":
            self._bury(payload)

    def _bury(self, trace: str) -> None:
        """Fail everything that waits, once, with the reason of death."""
        self._kill_group()
        code = self._process.wait()
        with self._state:
            if self._death is not None:
                return
            self._death = EngineDied(obituary(self.spec, self.pid, code, trace, self._closing))
            waiting = [*self._answers.values(), *self._generations.values(), self._ready]
            self._answers.clear()
            self._generations.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(self._death)

    def _kill_group(self) -> None:
        deadline = time.monotonic() + 2.0
        while self._process.poll() is None and time.monotonic() < deadline and not self._closing:
            time.sleep(0.02)  # a process that reported its death is about to exit with its own code
        end_group(self._process.pid)
        if self._ready.done() and self._ready.exception() is None:
            remove_shared_memory(self._ready.result()["shared_memory"])


def obituary(spec: EngineSpec, pid: int, code: int, trace: str, closing: bool) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    if closing:
        return f"rollout engine {spec.name} (pid {pid}) was closed"
    return f"rollout engine {spec.name} (pid {pid}, model {spec.model}) {how}" + (f":\n{trace}" if trace else "")
