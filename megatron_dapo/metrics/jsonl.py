"""The run's record on disk: one JSON object per line, which a crash can cut short but never corrupt."""

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
log = logging.getLogger(__name__)


class JsonlWriter:
    """Appends objects to a file, each in one write that has reached the disk before `write` returns.

    A last line that an earlier crash cut short is removed on opening, and what a failed write left is ended by the next
    one, so that appending never glues two lines together.
    Non-finite floats, which JSON lacks, are written as the strings "NaN", "Infinity", "-Infinity".
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._fd, _end_of_last_line(self._fd))

    def write(self, row: Mapping[str, Any]) -> None:
        self.write_all([row])

    def write_all(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Several rows for the price of one wait for the disk."""
        text = "".join(json.dumps(_plain(row), allow_nan=False, ensure_ascii=False) + "\n" for row in rows)
        lines = (text if _whole(self._fd) else "\n" + text).encode()
        while lines:
            lines = lines[os.write(self._fd, lines) :]
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a last line still being written is left out, and with a warning one that was cut short."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:
            log.warning("%s: line %d was cut short and is left out", path, number)
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value


def _whole(fd: int) -> bool:
    """Whether the file is empty or ends with a whole line."""
    end = os.lseek(fd, 0, os.SEEK_END)
    return end == 0 or os.pread(fd, 1, end - 1) == b"\n"


def _end_of_last_line(fd: int, block: int = 1 << 16) -> int:
    position = os.lseek(fd, 0, os.SEEK_END)
    while position > 0:
        start = max(0, position - block)
        newline = os.pread(fd, position - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0
