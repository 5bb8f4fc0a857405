"""Where checkpoints live and which one counts: written aside, verified, made visible by one rename, old ones pruned.

checkpoints/global_step_20/{actor,critic}/…  trainer_state.pt  manifest.json
checkpoints/latest_checkpointed_iteration.txt
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
_PREFIX, _PARTIAL = "global_step_", ".partial"


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoint directory of a run. Only the driver writes through it; ranks fill the directory it hands out."""

    root: Path
    keep: int | None = None

    def begin(self, step: int) -> Path:
        """An empty directory to write step `step` into; nobody takes it for a checkpoint before `commit`."""
        path = self.root / f"{_PREFIX}{step}{_PARTIAL}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def commit(self, step: int) -> Path:
        """Records every file's size and checksum, makes all durable, then moves the pointer. Prunes old checkpoints."""
        partial, final = self.root / f"{_PREFIX}{step}{_PARTIAL}", self.path(step)
        _write_durably(partial / MANIFEST, json.dumps(_manifest(partial), indent=1))
        for file in partial.rglob("*"):
            _sync(file)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _write_durably(self.root / TRACKER, str(step))
        _sync(self.root)
        self._prune(newest=step)
        return final

    def abandon(self, step: int) -> None:
        """Removes what `begin` handed out, after a failed save."""
        shutil.rmtree(self.root / f"{_PREFIX}{step}{_PARTIAL}", ignore_errors=True)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.root / f"{_PREFIX}{step}"

    def steps(self) -> list[int]:
        """The complete checkpoints' steps, oldest first."""
        names = (path.name.removeprefix(_PREFIX) for path in self.root.glob(f"{_PREFIX}*") if path.is_dir())
        return sorted(int(name) for name in names if name.isdigit())

    def latest(self, warn: Callable[[str], object] = print, *, since: float = 0.0) -> int | None:
        """The step that the pointer names, or else the newest; of those saved after `since` with all files whole.

        A damaged one is passed over with a warning.
        """
        pointed = self.pointed()
        saved = [step for step in self.steps() if self.path(step).stat().st_mtime >= since]
        for step in sorted(saved, key=lambda step: (step == pointed, step), reverse=True):
            damage = verify(self.path(step))
            if damage is None:
                return step
            warn(f"checkpoint {self.path(step)} is damaged ({damage}); trying another")
        return None

    def pointed(self) -> int | None:
        """The step in `latest_checkpointed_iteration.txt`, which moves only when a checkpoint is durable."""
        file = self.root / TRACKER
        text = file.read_text().strip() if file.is_file() else ""
        return int(text) if text.isdigit() else None

    def _prune(self, newest: int) -> None:
        if self.keep is not None:
            for step in [s for s in self.steps() if s <= newest][: -self.keep]:
                shutil.rmtree(self.path(step))


def verify(directory: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    manifest = directory / MANIFEST
    if not manifest.is_file():
        return f"no {MANIFEST}"
    for name, expected in json.loads(manifest.read_text()).items():
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        found = _fingerprint(file)
        if found != expected:
            return f"{name} has {found['bytes']} bytes, checksum {found['crc32']}; expected {expected}"
    return None


def step_of(directory: Path) -> int:
    """The step in a checkpoint's name. Raises UserError for another directory."""
    name = directory.name.removeprefix(_PREFIX)
    if not (directory.is_dir() and directory.name.startswith(_PREFIX) and name.isdigit()):
        raise UserError(
            f"trainer.resume_from_path={str(directory)!r} is not a checkpoint: "
            f"give an existing …/{_PREFIX}<step> directory"
        )
    return int(name)


def _manifest(directory: Path) -> dict[str, dict[str, int]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(directory)): _fingerprint(path) for path in files}


def _fingerprint(file: Path) -> dict[str, int]:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": file.stat().st_size, "crc32": checksum}


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
