"""Weights through shared memory of one host: every trainer rank writes its boxes where the vLLM worker will read them.

There is one file per destination, laid out as that destination stores its weights; destinations that store the same
(replicas of an engine) read the same file. All ranks open it by name; once all have, the name is removed and the file
lives only as long as somebody maps it, so nothing is left after a crash.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.models.slices import Layout
from megatron_dapo.resharding.checksum import checksum, is_checked
from megatron_dapo.resharding.layouts import Segment, digest, index_in_storage, segment
from megatron_dapo.resharding.memory import SharedFile, map_bytes, storage_view, unlink
from megatron_dapo.resharding.messages import damaged
from megatron_dapo.resharding.plan import Transfer, plan

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Receipt:
    """What one rank wrote into one file; `sums[i]`: its share of the checksum of slice i, if checked."""

    rank: int
    destinations: tuple[int, ...]  # all that read it
    name: str  # path, while the file has a name
    handle: str  # the file as this rank has it open: valid as long as this process lives
    nbytes: int
    written: int  # bytes
    digest: str
    sums: Mapping[int, int]


@dataclass(frozen=True)
class Copy:
    """One planned copy with both ends resolved."""

    param: str
    source: Index
    target: Tensor
    slice: int


class WeightPublisher:
    """The trainer's side of a push, on one rank. Every rank constructs it, with its own first three arguments."""

    def __init__(
        self,
        rank: int,
        my_layout: Layout,
        my_params: Callable[[str], Tensor],
        all_sources: Mapping[int, Layout],
        destinations: Mapping[int, Layout],
        path_prefix: str,
        *,
        dtypes: Mapping[str, str],
        check_every: int = 1,
    ) -> None:
        """`my_params` gives this rank's storage of a name; `dtypes` the dtype of each storage at the destinations.

        With `check_every=n` each push checks every nth slice only, another nth each time.
        Raises PlanError where the sources cannot serve a destination.
        """
        self.rank = rank
        self.params = my_params
        self.layout = my_layout
        self.check_every, self.pushes = check_every, 0
        readers: dict[str, list[int]] = defaultdict(list)
        for d, layout in sorted(destinations.items()):
            readers[digest(layout, dtypes)].append(d)
        self.readers = {same[0]: tuple(same) for same in readers.values()}
        files = {d: destinations[d] for d in self.readers}
        transfers: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in plan(all_sources, files).sends(rank):
            transfers[transfer.destination].append(transfer)
        self.segments = {d: segment(layout, dtypes) for d, layout in files.items()}
        self.files = {d: SharedFile(f"{path_prefix}-{d}", s.nbytes) for d, s in self.segments.items()}
        self.copies = {d: self._resolve(transfers[d], layout, d) for d, layout in files.items()}

    def _resolve(self, transfers: list[Transfer], layout: Layout, destination: int) -> list[Copy]:
        storages: Segment = self.segments[destination]
        memory = self.files[destination].bytes
        copies = []
        for t in transfers:
            ours, theirs = self.layout[t.source_slice], layout[t.destination_slice]
            target = storage_view(memory, storages.storages[theirs.param])[index_in_storage(theirs, t.offset, t.shape)]
            source = index_in_storage(ours, t.offset, t.shape)
            copies.append(Copy(ours.param, source, target, t.destination_slice))
        return copies

    @torch.no_grad()
    def write(self) -> list[Receipt]:
        """Copy (and cast) all that this rank sends. Local: the caller waits for all ranks, then tells the engine."""
        receipts = [self._write(destination) for destination in self.files]
        self.pushes += 1
        return receipts

    def _write(self, destination: int) -> Receipt:
        sums: dict[int, int] = defaultdict(int)
        written = 0
        for copy in self.copies[destination]:
            box = self.params(copy.param)[copy.source].to(copy.target.dtype)
            if is_checked(copy.slice, self.pushes, self.check_every):
                sums[copy.slice] += checksum(box)
            copy.target.copy_(box.view(copy.target.shape) if box.ndim != copy.target.ndim else box)
            written += copy.target.nbytes
        file, place = self.files[destination], self.segments[destination]
        return Receipt(
            rank=self.rank,
            destinations=self.readers[destination],
            name=file.path,
            handle=file.handle,
            nbytes=place.nbytes,
            written=written,
            digest=place.digest,
            sums=dict(sums),
        )

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def weight_update(receipts: Iterable[Receipt]) -> list[dict[str, Any]]:
    """Join the receipts of all ranks into what `RolloutEngine.update_weights` takes: one message per destination.

    Call it when every rank has written: the files have served their names by then, and lose them here.
    """
    by_destination: dict[int, list[Receipt]] = defaultdict(list)
    for receipt in receipts:
        for destination in receipt.destinations:
            by_destination[destination].append(receipt)
    update = []
    for destination in sorted(by_destination):
        parts = by_destination[destination]
        unlink([part.name for part in parts])
        first = parts[0]
        checked = sorted({i for part in parts for i in part.sums})
        sums = [(i, sum(part.sums.get(i, 0) for part in parts) % 2**64) for i in checked]
        details = {"handle": first.handle, "nbytes": first.nbytes, "sums": sums}
        update.append({"transport": "shared_memory", "digest": first.digest, "details": details})
    return update


class SharedMemoryReceiver:
    """The vLLM worker's side: its segment, mapped once."""

    def __init__(self, layout: Layout, place: Segment, details: Mapping[str, Any]) -> None:
        self.layout, self.segment = layout, place
        self.sums: Sequence[tuple[int, int]] = details["sums"]
        fd = os.open(details["handle"], os.O_RDWR | os.O_CLOEXEC)
        self.file = identity(os.fstat(fd))
        self.memory = map_bytes(fd, details["nbytes"])
        os.close(fd)
        self.received = 0  # bytes of the last push

    def serves(self, details: Mapping[str, Any]) -> bool:
        """Whether a new push is in the same file. Handles come again when a trainer starts anew; inodes do not."""
        self.sums = details["sums"]
        return identity(os.stat(details["handle"])) == self.file

    def storages(self) -> Iterator[tuple[str, Tensor]]:
        """Every storage, where it lies: it may be overwritten by the next push. Raises ChecksumError."""
        for i, expected in self.sums:
            piece = self.layout[i]
            storage = storage_view(self.memory, self.segment.storages[piece.param])
            if checksum(storage[index_in_storage(piece, piece.offset, piece.shape)]) != expected:
                raise damaged(piece.tensor, piece.offset, piece.shape)
        self.received = 0
        for param, storage_place in self.segment.storages.items():
            storage = storage_view(self.memory, storage_place)
            yield param, storage
            self.received += storage.nbytes  # the caller has copied it


def identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
