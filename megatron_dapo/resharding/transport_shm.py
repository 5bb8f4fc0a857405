"""Weights through shared memory of one host: every trainer rank writes its boxes where the vLLM worker will read them.

There is one file per destination, laid out as that destination stores its weights. All ranks open it by name; once
all have, the name is removed and the file lives only as long as somebody maps it, so nothing is left after a crash.
"""

import contextlib
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.models.slices import Layout, Slice
from megatron_dapo.resharding.checksum import checksum
from megatron_dapo.resharding.layouts import Segment, Storage, segment, storage_box
from megatron_dapo.resharding.plan import Transfer, plan

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Receipt:
    """What one rank wrote into one destination's file: `sums[i]` is its share of the checksum of slice i."""

    rank: int
    destination: int
    name: str  # path, while the file has a name
    handle: str  # the file as this rank has it open: valid as long as this process lives
    nbytes: int
    written: int  # bytes
    digest: str
    slices: int  # in the whole layout of the destination
    sums: Mapping[int, int]


class SharedFile:
    """A file mapped into this process, as bytes. Created if it is not there; every rank creates the same."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self.fd).st_size != nbytes:
            os.ftruncate(self.fd, nbytes)
        self.bytes = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)

    @property
    def handle(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        os.close(self.fd)
        unlink([self.path])


def unlink(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def storage_view(memory: Tensor, storage: Storage) -> Tensor:
    """The storage as a tensor over the bytes of its segment."""
    part = memory[storage.offset : storage.offset + storage.nbytes]
    return part.view(getattr(torch, storage.dtype)).view(storage.shape)


def index_in_storage(piece: Slice, offset: tuple[int, ...], shape: tuple[int, ...]) -> Index:
    """Where the box `offset + shape` of the HF tensor lies in the storage of a slice that contains it."""
    start, _ = storage_box(piece)
    extra = len(start) - len(shape)
    inner = [s + o - p for s, o, p in zip(start[extra:], offset, piece.offset, strict=True)]
    leading = [slice(s, s + 1) for s in start[:extra]]
    return (*leading, *(slice(i, i + n) for i, n in zip(inner, shape, strict=True)))


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
    ) -> None:
        """`my_params` gives this rank's storage of a name; `dtypes` the dtype of each storage at the destinations.

        Raises PlanError where the sources cannot serve a destination.
        """
        self.rank = rank
        self.params = my_params
        self.layout = my_layout
        self.sizes = {d: len(layout) for d, layout in destinations.items()}
        by_destination: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in plan(all_sources, destinations).sends(rank):
            by_destination[transfer.destination].append(transfer)
        self.segments = {d: segment(destinations[d], dtypes) for d in destinations}
        self.files = {d: SharedFile(f"{path_prefix}-{d}", s.nbytes) for d, s in self.segments.items()}
        self.copies = {d: self._resolve(by_destination[d], destinations[d], d) for d in destinations}

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
        return [self._write(destination) for destination in self.files]

    def _write(self, destination: int) -> Receipt:
        sums: dict[int, int] = defaultdict(int)
        written = 0
        for copy in self.copies[destination]:
            box = self.params(copy.param)[copy.source].to(copy.target.dtype)
            sums[copy.slice] += checksum(box)
            copy.target.copy_(box.view(copy.target.shape) if box.ndim != copy.target.ndim else box)
            written += copy.target.nbytes
        file, place = self.files[destination], self.segments[destination]
        return Receipt(
            rank=self.rank,
            destination=destination,
            name=file.path,
            handle=file.handle,
            nbytes=place.nbytes,
            written=written,
            digest=place.digest,
            slices=self.sizes[destination],
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
        by_destination[receipt.destination].append(receipt)
    update = []
    for destination in sorted(by_destination):
        parts = by_destination[destination]
        unlink([part.name for part in parts])
        first = parts[0]
        sums = [sum(part.sums.get(i, 0) for part in parts) % 2**64 for i in range(first.slices)]
        update.append({"handle": first.handle, "nbytes": first.nbytes, "digest": first.digest, "sums": sums})
    return update
