"""Weights through files of a directory that trainers and vLLM workers both see: slow, simple, and across any network.

Each source writes one file per destination: a line of JSON that says what is in it, then its messages. A file appears
under its name only when it is complete. The files of a push are removed when the next one has been written.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.models.slices import Layout
from megatron_dapo.resharding.layouts import Segment, segment, share_equal
from megatron_dapo.resharding.memory import unlink
from megatron_dapo.resharding.messages import (
    DEFAULT_BUCKET_BYTES,
    Message,
    empty_storages,
    from_json,
    messages,
    pack,
    storage_rounds,
    to_json,
    unpack,
)
from megatron_dapo.resharding.plan import Transfer, plan


@dataclass(frozen=True)
class FileReceipt:
    """One file that one rank has written for one destination."""

    rank: int
    destination: int
    path: str
    written: int  # bytes
    digest: str
    bucket_bytes: int
    push: int
    check_every: int


class FilePublisher:
    """The trainer's side, on one rank. Every rank constructs it, with its own first three arguments."""

    def __init__(
        self,
        rank: int,
        my_layout: Layout,
        my_params: Callable[[str], Tensor],
        all_sources: Mapping[int, Layout],
        destinations: Mapping[int, Layout],
        directory: str | Path,
        *,
        dtypes: Mapping[str, str],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        check_every: int = 1,
    ) -> None:
        """Raises PlanError where the sources cannot serve a destination."""
        self.rank, self.layout, self.params, self.dtypes = rank, my_layout, my_params, dtypes
        self.directory, self.bucket_bytes = Path(directory), bucket_bytes
        self.destinations = dict(destinations)
        self.segments = {d: segment(layout, dtypes) for d, layout in destinations.items()}
        self.pushes, self.check_every = 0, check_every
        self.old: list[str] = []
        sends: dict[int, list[Transfer]] = defaultdict(list)
        for t in plan(all_sources, share_equal(destinations)).sends(rank):
            sends[t.destination].append(t)
        self.messages = {
            d: messages(sends[d], layout, dtypes, storage_rounds(self.segments[d], bucket_bytes))
            for d, layout in destinations.items()
            if sends[d]
        }

    def write(self) -> list[FileReceipt]:
        """Write this rank's files. Local: the caller waits for all ranks, then tells the engine."""
        self.directory.mkdir(parents=True, exist_ok=True)
        receipts = [self._write(destination) for destination in self.messages]
        unlink(self.old)
        self.old = [receipt.path for receipt in receipts]
        self.pushes += 1
        return receipts

    def _write(self, destination: int) -> FileReceipt:
        path = self.directory / f"{self.pushes}-{self.rank}-to-{destination}.weights"
        partial = path.with_suffix(".partial")
        made = self.messages[destination]
        buffer = torch.empty(max(m.nbytes for m, _ in made.values()), dtype=torch.uint8)
        theirs = self.destinations[destination]
        with partial.open("wb") as file:
            file.write(json.dumps(to_json({r: m for r, (m, _) in made.items()})).encode() + b"\n")
            for message, transfers in made.values():
                pack(
                    message,
                    transfers,
                    self.layout,
                    theirs,
                    self.params,
                    self.dtypes,
                    buffer,
                    self.pushes,
                    self.check_every,
                )
                file.write(buffer[: message.nbytes].numpy().data)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        partial.rename(path)
        digest = self.segments[destination].digest
        return FileReceipt(
            self.rank, destination, str(path), size, digest, self.bucket_bytes, self.pushes, self.check_every
        )

    def close(self) -> None:
        unlink(self.old)


def file_update(receipts: Iterable[FileReceipt]) -> list[dict[str, Any]]:
    """Join the receipts of all ranks into what `RolloutEngine.update_weights` takes: one message per destination."""
    by_destination: dict[int, list[FileReceipt]] = defaultdict(list)
    for receipt in receipts:
        by_destination[receipt.destination].append(receipt)
    return [
        {
            "transport": "files",
            "digest": parts[0].digest,
            "details": {
                "paths": [part.path for part in parts],
                "bucket_bytes": parts[0].bucket_bytes,
                "push": parts[0].push,
                "check_every": parts[0].check_every,
            },
        }
        for _, parts in sorted(by_destination.items())
    ]


class FileReceiver:
    """The vLLM worker's side."""

    def __init__(self, layout: Layout, place: Segment, details: Mapping[str, Any]) -> None:
        self.layout, self.segment = layout, place
        self.paths: list[str] = details["paths"]
        self.bucket_bytes: int = details["bucket_bytes"]
        self.push, self.check_every = details["push"], details["check_every"]
        self.received = 0  # bytes of the last push, with their checksums

    def serves(self, details: Mapping[str, Any]) -> bool:
        return False  # the next push has other files

    def storages(self) -> Iterator[tuple[str, Tensor]]:
        """Every storage, complete, one after the other. Raises OSError for a file that is missing or too short."""
        files = []
        try:
            for path in self.paths:
                file = open(path, "rb")  # noqa: SIM115 (closed below, together)
                files.append((path, file, from_json(json.loads(file.readline()))))
            for r, params in enumerate(storage_rounds(self.segment, self.bucket_bytes)):
                held = empty_storages(self.segment, params)
                for path, file, sent in files:
                    if r in sent:
                        buffer = read_message(path, file, sent[r])
                        unpack(sent[r], buffer, self.layout, held, self.push, self.check_every)
                        self.received += sent[r].nbytes
                yield from held.items()
        finally:
            for _, file, _ in files:
                file.close()


def read_message(path: str, file: Any, message: Message) -> Tensor:
    buffer = torch.empty(message.nbytes, dtype=torch.uint8)
    found = file.readinto(buffer.numpy().data)
    if found != message.nbytes:
        raise OSError(f"{path} ends after {found} of the {message.nbytes} bytes of a message: it is incomplete")
    return buffer
