"""Writes a run's checkpoints: while the driver waits, or beside the training that goes on.

Either way the ranks fill a directory that nobody takes for a checkpoint, and one rename at the end, when every byte is
on disk and has its checksum, makes it the latest. A crash at any time before leaves the previous one the latest.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.errors import UserError
from megatron_dapo.runtime.group import WorkerGroup
from megatron_dapo.trainers.checkpoints import CheckpointStore

TRAINER_STATE = "trainer_state.pt"


class Saver:
    """One save at a time. In the background, `poll` between steps takes it forward and `finish` waits for it."""

    def __init__(self, group: WorkerGroup, store: CheckpointStore, background: bool):
        self._group, self._store, self._background = group, store, background
        self._writing: int | None = None  # the step whose files the ranks are writing
        self._committing: Future[Path] | None = None  # checksums and the rename, on a thread
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def save(self, step: int, state: dict[str, Any], more: Sequence[Callable[[Path], None]] = ()) -> None:
        """A checkpoint of all ranks, of the driver's `state`, and of what `more` writes into its directory.

        What is saved is fixed on return, in the background too.
        """
        self.finish()
        partial = self._store.begin(step)
        with self._or_no_trace(step):
            self._group.call("save", directory=partial, background=self._background)
            for write in more:
                write(partial)
            torch.save(state, partial / TRAINER_STATE)
            if self._background:
                self._writing = step
            else:
                self._store.commit(step)

    def poll(self) -> None:
        """Takes a background save one stage further if the stage before is done; returns at once."""
        if self._writing is not None and self._committing is None:
            self._commit_when_written(self._writing, wait=False)
        if self._committing is not None and self._committing.done():
            self.finish()

    def finish(self) -> None:
        """Returns when no save is under way."""
        step = self._writing
        if step is None:
            return
        if self._committing is None:
            self._commit_when_written(step, wait=True)
        assert self._committing is not None
        committing, self._writing, self._committing = self._committing, None, None
        with self._or_no_trace(step):
            committing.result()

    def _commit_when_written(self, step: int, wait: bool) -> None:
        with self._or_no_trace(step):
            if all(self._group.call("saved", wait=wait)):
                self._committing = self._thread.submit(self._store.commit, step)

    @contextmanager
    def _or_no_trace(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._store.abandon(step)
            raise UserError(
                f"the checkpoint of step {step} in {self._store.root} could not be written: {error.strerror}. Free "
                "space or set trainer.max_ckpt_to_keep; earlier checkpoints are untouched: the run continues from the "
                "latest"
            ) from error
        except BaseException:
            self._store.abandon(step)
            raise
