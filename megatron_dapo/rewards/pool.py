"""A pool of verifier processes with a hard deadline per job, usable from any thread.

Each worker is a plain child process (no fork of a process that holds CUDA, threads or vLLM) driven by one thread. A job
that outlives its deadline costs its worker the life (SIGKILL) and a new one starts; a worker that dies is replaced. The
job at fault is tried again `retries` times; jobs that waited behind it are simply run elsewhere.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_dapo
from megatron_dapo.rewards import channel
from megatron_dapo.rewards.errors import RewardError
from megatron_dapo.rewards.worker import CLOCK, START_TIMEOUT_S, Setup

ASYNC_CHUNK = 64  # jobs of an async function that wait for their answers together
SYNC_CHUNK = 16
GRACE_S = 0.5  # an async worker reports its own timeouts; wait that much longer for it to do so


@dataclass(frozen=True)
class Outcome:
    """`status` is "ok", or how the last try failed: "timeout", "crash", "error". `cpu_s` is set for a timeout."""

    status: str
    value: Any
    cpu_s: float = 0.0


CLOSED = Outcome("crash", "the reward pool was closed")


@dataclass
class _Task:
    kind: str
    arguments: tuple
    tries_left: int
    future: "Future[Outcome]" = field(default_factory=Future)


class Pool:
    """`workers` processes, started when first needed."""

    def __init__(self, workers: int, setup: Setup, *, retries: int = 1) -> None:
        self.setup, self.retries = setup, retries
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []  # of every job that a worker answered
        self.lock = threading.Lock()
        self._queue: queue.SimpleQueue[list[_Task] | None] = queue.SimpleQueue()
        self._drivers = [_Driver(self) for _ in range(workers)]
        self.closed = False

    def start(self) -> None:
        """Start one worker now. Raises RewardError when it cannot load what it is to run."""
        self._drivers[0].worker()

    def run(self, jobs: Sequence[tuple[str, tuple]]) -> list[Outcome]:
        """Run `(kind, arguments)` jobs and return their outcomes in order; takes no longer than the deadlines allow."""
        tasks = [_Task(kind, arguments, self.retries) for kind, arguments in jobs]
        size = max(1, min(self._chunk(), -(-len(tasks) // (2 * len(self._drivers)))))
        with self.lock:
            if self.closed:
                raise RewardError("the reward pool is closed")
            for driver in self._drivers:
                driver.ensure_thread()
            for start in range(0, len(tasks), size):
                self._queue.put(tasks[start : start + size])
        return [task.future.result() for task in tasks]

    def close(self) -> None:
        """End every worker. Jobs still running fail."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            for _ in self._drivers:
                self._queue.put(None)  # behind every job, so that each of them is still answered (with a failure)
        for driver in self._drivers:
            driver.retire()
        for driver in self._drivers:
            driver.join()

    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [pid for driver in self._drivers if (pid := driver.pid()) is not None]

    def count(self, name: str, amount: int = 1) -> None:
        with self.lock:
            self.counts[name] += amount

    def took(self, seconds: float) -> None:
        with self.lock:
            self.seconds.append(seconds)

    def _chunk(self) -> int:
        return SYNC_CHUNK if self.setup.custom is None or not self._drivers[0].asynchronous() else ASYNC_CHUNK

    def settle(self, task: _Task, outcome: Outcome) -> None:
        """Give a failed task another try while it has one; otherwise its outcome is final."""
        if outcome.status != "ok":
            self.count({"timeout": "timeouts", "crash": "crashes", "error": "errors"}[outcome.status])
            if task.tries_left > 0 and not self.closed and outcome.cpu_s < self.setup.cpu_budget_s:
                task.tries_left -= 1
                self.count("retries")
                self._queue.put([task])
                return
        task.future.set_result(outcome)

    def requeue(self, tasks: list[_Task]) -> None:
        """Put back tasks that were not at fault."""
        for task in tasks:
            if self.closed:
                task.future.set_result(CLOSED)
            else:
                self._queue.put([task])

    def take(self) -> list[_Task] | None:
        return self._queue.get()


class _Worker:
    """A running process and our end of its socket."""

    def __init__(self, setup: Setup) -> None:
        self.sock, theirs = socket.socketpair()
        root = str(Path(megatron_dapo.__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_dapo.rewards.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # a terminal's Ctrl-C goes to the trainer alone
            )
        try:
            channel.send(self.sock, setup, time.monotonic() + START_TIMEOUT_S)
            status, detail = channel.receive(self.sock, time.monotonic() + START_TIMEOUT_S)
        except (OSError, EOFError) as error:
            self.kill()
            raise ConnectionError(f"a reward worker died or did not start within {START_TIMEOUT_S:g} s") from error
        if status == "error":
            self.kill()
            raise RewardError(detail)
        self.asynchronous = bool(detail)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.sock.close()

    def cpu_seconds(self) -> float:
        """CPU time used so far; 0 when the process is gone."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Driver:
    """The thread that feeds one worker."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._worker: _Worker | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def ensure_thread(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="reward-pool", daemon=True)
                self._thread.start()

    def worker(self) -> _Worker:
        with self._lock:
            if self._worker is None:
                self._worker = _Worker(self.pool.setup)
            return self._worker

    def asynchronous(self) -> bool:
        return self.worker().asynchronous

    def pid(self) -> int | None:
        worker = self._worker
        return None if worker is None else worker.process.pid

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def retire(self) -> None:
        """Kill the worker; the next job starts another."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _loop(self) -> None:
        while (tasks := self.pool.take()) is not None:
            try:
                self._process(tasks)
            except Exception as error:  # a driver must not die with futures unset: callers would wait for ever
                for task in tasks:
                    if not task.future.done():
                        task.future.set_exception(error)

    def _process(self, tasks: list[_Task]) -> None:
        pool, limit = self.pool, self.pool.setup.timeout_s
        pending = dict(enumerate(tasks))
        if pool.closed:
            return pool.requeue(tasks)
        try:
            worker = self.worker()
        except ConnectionError as error:
            return self._lose(pending, Outcome("crash", str(error)), at_fault=len(tasks))
        at_fault = len(tasks) if worker.asynchronous else 1
        began, cpu = time.monotonic(), worker.cpu_seconds()
        try:
            channel.send(worker.sock, [(i, task.kind, task.arguments) for i, task in pending.items()], began + limit)
            while pending:
                deadline = began + limit + (GRACE_S if worker.asynchronous else 0.0)
                ident, status, value = channel.receive(worker.sock, deadline)
                if ident == CLOCK:  # the worker imports something: not the job's time
                    began = time.monotonic() + (START_TIMEOUT_S - limit if status == "stop" else 0.0)
                    continue
                pool.took(time.monotonic() - began)
                pool.settle(pending.pop(ident), Outcome(status, value))
                if not worker.asynchronous and pending:  # one after the other: each has the whole time
                    began, cpu = time.monotonic(), worker.cpu_seconds()
        except TimeoutError:
            used = worker.cpu_seconds() - cpu
            self._lose(pending, Outcome("timeout", f"no verdict within {limit:g} s; worker killed", used), at_fault)
        except (EOFError, OSError):
            self._lose(pending, Outcome("crash", f"the worker died (exit code {worker.process.poll()})"), at_fault)
        return None

    def _lose(self, pending: dict[int, _Task], outcome: Outcome, at_fault: int) -> None:
        """The worker is lost, and with it the job it was at (all of them, if it was at all of them)."""
        self.retire()
        self.pool.count("workers_replaced")
        tasks = list(pending.values())
        self.pool.requeue(tasks[at_fault:])
        for task in tasks[:at_fault]:
            self.pool.settle(task, outcome)
