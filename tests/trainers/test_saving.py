"""A background save becomes the latest only when every rank has written everything; before that the previous one is."""

from pathlib import Path
from typing import Any

import pytest

from megatron_dapo.errors import UserError
from megatron_dapo.trainers.checkpoints import CheckpointStore, verify
from megatron_dapo.trainers.saving import Saver


class Ranks:
    """Two ranks whose writes end when the test says so."""

    size = 2

    def __init__(self) -> None:
        self.pending: list[Path] = []
        self.full = False

    def call(self, method: str, shares: Any = None, **common: Any) -> list[Any]:
        if method == "save" and common["background"]:
            self.pending.append(common["directory"])
        elif method == "save":
            self.write(common["directory"])
        elif self.full:
            raise OSError(28, "No space left on device")
        elif common["wait"]:
            self.complete()
        return [True, not self.pending]

    def write(self, directory: Path) -> None:
        (directory / "weights").write_bytes(b"w" * 100)

    def complete(self) -> None:
        while self.pending:
            self.write(self.pending.pop())

    def close(self) -> None: ...


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path, keep=2)


def test_in_the_foreground_it_stands_on_return(store):
    Saver(Ranks(), store, background=False).save(1, {"step": 1})
    assert store.latest() == 1


def test_in_the_background_it_stands_when_all_is_written(store):
    ranks = Ranks()
    saver = Saver(ranks, store, background=True)
    saver.save(1, {"step": 1})
    saver.finish()
    saver.save(2, {"step": 2})
    for _ in range(3):
        saver.poll()
        assert store.steps() == [1] and store.latest() == 1  # a crash here resumes from 1
    ranks.complete()
    while store.steps() == [1]:
        saver.poll()
    saver.finish()
    assert store.latest() == 2 and verify(store.path(2)) is None


def test_the_next_save_and_the_end_wait_for_the_one_under_way(store):
    saver = Saver(Ranks(), store, background=True)
    saver.save(1, {})
    saver.save(2, {})
    assert store.steps() == [1]
    saver.finish()
    assert store.steps() == [1, 2]


def test_a_write_that_fails_later_leaves_no_trace(store):
    ranks = Ranks()
    saver = Saver(ranks, store, background=True)
    saver.save(1, {})
    saver.finish()
    saver.save(2, {})
    ranks.full = True
    with pytest.raises(UserError, match="max_ckpt_to_keep"):
        saver.finish()
    assert store.latest() == 1 and [p.name for p in store.root.glob("*.partial")] == []
