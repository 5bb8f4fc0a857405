"""A checkpoint counts only when all of it is there: torn, damaged and half-written ones are passed over."""

import os

import pytest

from megatron_dapo.errors import UserError
from megatron_dapo.trainers.checkpoints import TRACKER, CheckpointStore, step_of, verify


def write(store: CheckpointStore, step: int) -> None:
    partial = store.begin(step)
    (partial / "actor").mkdir()
    (partial / "actor" / "weights").write_bytes(bytes([step]) * 1000)
    (partial / "trainer_state.pt").write_bytes(b"state")
    store.commit(step)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def test_the_latest_complete_checkpoint_wins(store):
    write(store, 2)
    write(store, 10)
    assert store.latest() == 10
    assert (store.root / TRACKER).read_text() == "10"
    assert verify(store.path(10)) is None


def test_after_a_restart_only_what_this_launch_has_saved_counts(store, monkeypatch):
    from megatron_dapo.trainers.bringup import saved_since_launch

    write(store, 100)  # of an earlier run in the same directory
    os.utime(store.path(100), (1000.0, 1000.0))
    monkeypatch.setenv("LAUNCH_TIME", "2000.5")
    monkeypatch.setenv("LAUNCH_ATTEMPT", "1")
    assert saved_since_launch(store) is None
    write(store, 2)
    assert saved_since_launch(store) == 2
    monkeypatch.setenv("LAUNCH_ATTEMPT", "0")
    assert saved_since_launch(store) is None


def test_an_uncommitted_checkpoint_does_not_exist(store):
    write(store, 1)
    (store.begin(2) / "actor").mkdir()
    assert store.steps() == [1]
    assert store.latest() == 1
    store.abandon(2)
    assert sorted(path.name for path in store.root.iterdir()) == ["global_step_1", TRACKER]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "actor" / "weights").unlink(),
        lambda path: (path / "actor" / "weights").write_bytes(b"short"),
        lambda path: (path / "actor" / "weights").write_bytes(bytes([9]) * 1000),
        lambda path: (path / "manifest.json").unlink(),
    ],
    ids=["missing file", "truncated file", "flipped bytes", "no manifest"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(store, damage):
    write(store, 1)
    write(store, 2)
    damage(store.path(2))
    warnings = []
    assert store.latest(warn=warnings.append) == 1
    assert "global_step_2" in warnings[0]


def test_the_pointer_decides_until_what_it_names_is_gone(store):
    for step in (1, 2, 3):
        write(store, step)
    (store.root / TRACKER).write_text("2\n")  # as after a crash before it moved, or by hand
    assert store.latest() == 2
    for text in ("7", "release", ""):
        (store.root / TRACKER).write_text(text)
        assert store.latest() == 3
    (store.root / TRACKER).unlink()
    assert store.latest() == 3


def test_nothing_to_resume_is_none(store):
    assert store.latest() is None


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 3]), (1, [3]), (2, [2, 3])])
def test_old_checkpoints_go_after_the_new_one_stands(tmp_path, keep, left):
    store = CheckpointStore(tmp_path, keep=keep)
    for step in (1, 2, 3):
        write(store, step)
    assert store.steps() == left


def test_saving_a_step_again_replaces_it(store):
    write(store, 5)
    write(store, 5)
    assert store.steps() == [5]
    assert verify(store.path(5)) is None


def test_a_wrong_resume_path_is_told(tmp_path):
    with pytest.raises(UserError, match="resume_from_path"):
        step_of(tmp_path)
    (tmp_path / "global_step_7").mkdir()
    assert step_of(tmp_path / "global_step_7") == 7
