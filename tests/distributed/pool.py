"""Ranks for tests: fresh processes for every task, forked from one server that has imported torch and Megatron already.

So eight ranks cost one import and a fork each, and nothing (groups, their threads, Megatron's globals) leaks from one
case into the next.
"""

import io
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

PRELOAD = ["tests.distributed.preload"]
Pipe = Any


class RankError(AssertionError):
    """A rank raised or died; carries that rank's traceback."""


class RankPool:
    """`run(function, world, *arguments)` calls a module-level function on ranks 0..world-1 of a new world."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._tasks = 0

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._directory.cleanup()

    def run(self, function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 300.0) -> list[Any]:
        """The ranks' results in order. Raises RankError with the traceback of the first rank that fails."""
        self._tasks += 1
        store = str(Path(self._directory.name) / f"store{self._tasks}")
        processes, pipes = [], {}
        for rank in range(world):
            ours, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=_rank, args=(theirs, function, rank, world, store, arguments)
            )  # not a daemon: saving a checkpoint starts processes of its own
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        try:
            return self._collect(pipes, world, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()

    def _collect(self, pipes: dict[Pipe, int], world: int, timeout: float) -> list[Any]:
        results: list[Any] = [None] * world
        while pipes:
            ready = connection.wait(list(pipes), timeout=timeout)
            if not ready:
                raise RankError(f"ranks {sorted(pipes.values())} of {world} did not answer in {timeout:.0f} s")
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    status, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    status, value = "error", f"rank {rank} of {world} died"
                if status == "error":
                    raise RankError(value)
                results[rank] = torch.load(io.BytesIO(value), weights_only=False)
        return results


def _rank(pipe: Pipe, function: Callable[..., Any], rank: int, world: int, store: str, arguments: Any) -> None:
    import logging
    import warnings
    from datetime import timedelta

    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=240)
        )
        result = function(*arguments)
        dist.barrier()  # nobody leaves while another still talks to it
        stream = io.BytesIO()  # plain bytes: tensors sent as such live in this process's memory
        torch.save(result, stream)
        pipe.send(("ok", stream.getvalue()))
    except BaseException:
        pipe.send(("error", f"rank {rank} of {world}:\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        os._exit(0)
