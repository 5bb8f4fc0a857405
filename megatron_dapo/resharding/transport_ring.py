"""Weights through two buckets of shared memory: the trainer fills one while the vLLM worker takes the other.

Like `transport_shm`, but with bounded memory and both sides at work at once; the engine generates nothing meanwhile.
There is one file per destination: counters, checksums, and two slots. Round n of a push (see `messages`) lies in slot
n % 2, laid out as the destination stores it. Everybody counts rounds from the first push on, and only ever upwards:
a source has written so many, the worker has taken so many. A source fills a slot when the worker has taken what was in
it; the worker takes a round when every source has written its part. No locks, so nobody can die holding one.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.models.slices import Layout
from megatron_dapo.resharding.checksum import checksum, is_checked
from megatron_dapo.resharding.layouts import ALIGNMENT, Segment, Storage, index_in_storage
from megatron_dapo.resharding.memory import SharedFile, map_bytes, storage_view, unlink
from megatron_dapo.resharding.messages import (
    DEFAULT_BUCKET_BYTES,
    TransferError,
    damaged,
    signed,
    storage_rounds,
)
from megatron_dapo.resharding.parts import Parts, dtypes_of, in_parts
from megatron_dapo.resharding.plan import Transfer, plan
from megatron_dapo.resharding.transport_ipc import exported_slots, settle

SLOTS = 2
PAGE = 4096
WORKER, TAKEN, FIXED = 0, 1, 2  # the header: the worker's pid, rounds it has taken, then two words per source
GAVE_UP = -1  # in place of the pid of a worker or a source that could not go on with a push
LOOK_SECONDS = 0.5  # how often a waiting side looks whether the other one lives


@dataclass(frozen=True)
class Ring:
    """The geometry of one destination's file, the same for everybody who knows its layout."""

    rounds: tuple[tuple[str, ...], ...]
    storages: Mapping[str, Storage]  # offsets within a slot
    slices: tuple[tuple[int, ...], ...]  # of each round, as numbers in the layout
    sources: int
    slot_bytes: int

    @classmethod
    def of(cls, layout: Layout, place: Segment, sources: int, bucket_bytes: int) -> "Ring":
        rounds = tuple(tuple(params) for params in storage_rounds(place, bucket_bytes))
        storages: dict[str, Storage] = {}
        size = 0
        for params in rounds:
            end = 0
            for param in params:
                whole = place.storages[param]
                storages[param] = Storage(param, whole.shape, whole.dtype, end)
                end += -(-whole.nbytes // ALIGNMENT) * ALIGNMENT
            size = max(size, end)
        number = {param: r for r, params in enumerate(rounds) for param in params}
        slices: list[list[int]] = [[] for _ in rounds]
        for i, piece in enumerate(layout):
            slices[number[piece.param]].append(i)
        return cls(rounds, storages, tuple(map(tuple, slices)), sources, -(-size // PAGE) * PAGE)

    @property
    def sums_per_slot(self) -> int:
        return self.sources * max(map(len, self.slices))

    @property
    def header_bytes(self) -> int:
        words = FIXED + 2 * self.sources + SLOTS * self.sums_per_slot
        return -(-8 * words // PAGE) * PAGE

    @property
    def slots_bytes(self) -> int:
        return SLOTS * self.slot_bytes

    def file_bytes(self, slots_elsewhere: bool) -> int:
        return self.header_bytes + (0 if slots_elsewhere else self.slots_bytes)


class RingMemory:
    """The file of one destination, with names for its parts. The slots may lie elsewhere, on a GPU."""

    def __init__(self, ring: Ring, memory: Tensor, slots: Tensor | None = None) -> None:
        self.ring = ring
        words = memory[: ring.header_bytes].view(torch.int64)
        self.worker, self.taken = words[WORKER : WORKER + 1], words[TAKEN : TAKEN + 1]
        self.written = words[FIXED : FIXED + ring.sources]
        self.writers = words[FIXED + ring.sources : FIXED + 2 * ring.sources]
        sums = words[FIXED + 2 * ring.sources :][: SLOTS * ring.sums_per_slot]
        self.sums = sums.view(SLOTS, ring.sources, -1)  # the share of each source in the checksum of each slice
        slots = memory[ring.header_bytes :] if slots is None else slots
        self.slots = [slots[i * ring.slot_bytes : (i + 1) * ring.slot_bytes] for i in range(SLOTS)]

    def storage(self, slot: int, param: str) -> Tensor:
        return storage_view(self.slots[slot], self.ring.storages[param])


def wait(ready: Callable[[], bool], missing: Callable[[], str | None], seconds: float) -> None:
    """Sleep until it is ready. Raises TransferError when `missing` names somebody who is gone, or time is up."""
    pause, start = 20e-6, time.monotonic()
    look = start + LOOK_SECONDS
    while not ready():
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
        if time.monotonic() > look:
            gone = missing()
            if gone is not None:
                raise TransferError(f"a push of weights cannot go on: {gone} is gone")
            if time.monotonic() - start > seconds:
                raise TransferError(f"a push of weights made no progress for {seconds:.0f} s")
            look = time.monotonic() + LOOK_SECONDS


def lives(pid: int) -> bool:
    return pid == 0 or os.path.exists(f"/proc/{pid}")


def give_up(details: Mapping[str, Any]) -> None:
    """In the name of a worker that cannot: tell the sources of this update not to wait for it."""
    with open(details["handle"], "r+b") as file:
        file.seek(8 * WORKER)
        file.write(GAVE_UP.to_bytes(8, sys.byteorder, signed=True))


@dataclass(frozen=True)
class Fill:
    """What this rank writes into one round of one destination: source storage and place, target place, slice."""

    param: str
    source: tuple[slice, ...]
    target_param: str
    target: tuple[slice, ...]
    slice: int  # its number among the slices of the round


class RingPublisher:
    """The trainer's side, on one rank. Every rank constructs it, with its own first three arguments."""

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
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_seconds: float = 300.0,
        slots: Mapping[int, Tensor] | None = None,
        check_every: int = 1,
    ) -> None:
        """`slots`: the destinations' own memory where it is not the file's (`transport_ipc.open_slots`).

        Raises PlanError where the sources cannot serve a destination."""
        self.params, self.layout, self.timeout = my_params, my_layout, timeout_seconds
        self.index, self.pushes, self.bucket_bytes = sorted(all_sources).index(rank), 0, bucket_bytes
        self.check_every = check_every
        parts = in_parts(destinations, dtypes, bucket_bytes)
        sends: dict[int, list[Transfer]] = defaultdict(list)
        for t in plan(all_sources, {d: made.layout for d, made in parts.items()}).sends(rank):
            sends[t.destination].append(t)
        self.slots_elsewhere = slots is not None
        self.digests: dict[int, str] = {}
        self.files: dict[int, SharedFile] = {}
        self.memories: dict[int, RingMemory] = {}
        self.fills: dict[int, dict[int, list[Fill]]] = {}
        for d, made in sorted(parts.items()):
            ring = Ring.of(made.layout, made.place, len(all_sources), bucket_bytes)
            self.digests[d] = made.whole.digest
            self.files[d] = SharedFile(f"{path_prefix}-{d}", ring.file_bytes(slots is not None))
            self.memories[d] = RingMemory(ring, self.files[d].bytes, slots[d] if slots is not None else None)
            self.memories[d].writers[self.index] = os.getpid()
            self.fills[d] = self._fills(ring, made.layout, sends[d])

    def _fills(self, ring: Ring, layout: Layout, transfers: list[Transfer]) -> dict[int, list[Fill]]:
        place = {i: (r, k) for r, slices in enumerate(ring.slices) for k, i in enumerate(slices)}
        fills: dict[int, list[Fill]] = defaultdict(list)
        for t in transfers:
            ours, theirs = self.layout[t.source_slice], layout[t.destination_slice]
            r, k = place[t.destination_slice]
            source, target = (index_in_storage(side, t.offset, t.shape) for side in (ours, theirs))
            fills[r].append(Fill(ours.param, source, theirs.param, target, k))
        return fills

    def update(self) -> list[dict[str, Any]]:
        """What `RolloutEngine.update_weights_soon` takes for the push that the next `send` makes, per destination."""
        return [
            {
                "transport": "ring",
                "digest": self.digests[d],
                "details": {
                    "handle": file.handle,
                    "name": file.path,
                    "sources": memory.ring.sources,
                    "bucket_bytes": self.bucket_bytes,
                    "push": self.pushes,
                    "check_every": self.check_every,
                    "slots_elsewhere": self.slots_elsewhere,
                    "timeout_seconds": self.timeout,
                },
            }
            for (d, file), memory in zip(self.files.items(), self.memories.values(), strict=True)
        ]

    @torch.no_grad()
    def send(self) -> int:
        """Write everything, bucket by bucket, as the workers take them; returns bytes. Call it on every rank.

        Raises TransferError when a worker dies or stands still.
        """
        push, self.pushes = self.pushes, self.pushes + 1
        written = 0
        self._sign(os.getpid())
        try:
            for r in range(max(len(memory.ring.rounds) for memory in self.memories.values())):
                for d, memory in self.memories.items():
                    if r < len(memory.ring.rounds):
                        written += self._send_round(memory, self.fills[d].get(r, []), push, r, d)
        except TransferError:
            self._sign(GAVE_UP)  # the other workers must not wait for what will not come
            raise
        return written

    def _sign(self, pid: int) -> None:
        for memory in self.memories.values():
            memory.writers[self.index] = pid

    def _send_round(self, memory: RingMemory, fills: list[Fill], push: int, r: int, destination: int) -> int:
        first = push * len(memory.ring.rounds)
        total = first + r
        slot = total % SLOTS
        free = max(total - SLOTS + 1, first)  # what was in this slot is taken, and so is all of an earlier push
        wait(
            lambda: int(memory.taken) >= free,
            lambda: None if lives(int(memory.worker)) else f"the rollout worker of destination {destination}",
            self.timeout,
        )
        memory.sums[slot, self.index].zero_()
        written = 0
        for fill in fills:
            target = memory.storage(slot, fill.target_param)[fill.target]
            box = self.params(fill.param)[fill.source].to(target.dtype)
            if is_checked(fill.slice, push, self.check_every):
                memory.sums[slot, self.index, fill.slice] += signed(checksum(box))
            target.copy_(box.reshape(target.shape))
            written += target.nbytes
        settle(memory.slots[slot])
        memory.written[self.index] = total + 1
        return written

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class RingReceiver:
    """The vLLM worker's side."""

    def __init__(self, layout: Layout, place: Segment, details: Mapping[str, Any]) -> None:
        self.parts = Parts.of(layout, dtypes_of(place), details["bucket_bytes"])
        self.layout = self.parts.layout
        self.ring = Ring.of(self.layout, self.parts.place, details["sources"], details["bucket_bytes"])
        fd = os.open(details["handle"], os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(fd)
        self.file = (status.st_dev, status.st_ino)
        elsewhere = details["slots_elsewhere"]
        header = map_bytes(fd, self.ring.file_bytes(elsewhere))
        self.memory = RingMemory(self.ring, header, exported_slots() if elsewhere else None)
        os.close(fd)
        self.details = details
        self.received = 0  # bytes of the last push

    def serves(self, details: Mapping[str, Any]) -> bool:
        self.details = details
        status = os.stat(details["handle"])
        return (status.st_dev, status.st_ino) == self.file

    def storages(self) -> Iterator[tuple[str, Tensor]]:
        """Every storage, where it lies or put together: its slot is given back when the caller asks for the next."""
        return self.parts.joined(self._rounds())

    def _rounds(self) -> Iterator[tuple[str, Tensor]]:
        memory, rounds = self.memory, self.ring.rounds
        first = self.details["push"] * len(rounds)
        memory.worker[0] = os.getpid()
        memory.taken[0] = first
        complete, self.received = False, 0
        try:
            for r, params in enumerate(rounds):
                total = first + r
                wait(partial(self._written, total), self._missing, self.details["timeout_seconds"])
                slot = total % SLOTS
                self._verify(slot, r)
                for param in params:
                    storage = memory.storage(slot, param)
                    yield param, storage
                    self.received += storage.nbytes  # the caller has copied it
                settle(memory.slots[slot])
                memory.taken[0] = total + 1
            complete = True
        finally:
            if not complete:
                memory.worker[0] = GAVE_UP
        unlink([self.details["name"]])  # everybody has it open by now

    def _written(self, total: int) -> bool:
        return bool((self.memory.written > total).all())

    def _missing(self) -> str | None:
        gone = [i for i, pid in enumerate(self.memory.writers.tolist()) if not lives(pid)]
        return f"trainer rank {gone[0]}" if gone else None

    def _verify(self, slot: int, r: int) -> None:
        push, every = self.details["push"], self.details["check_every"]
        for k, i in enumerate(self.ring.slices[r]):
            if not is_checked(k, push, every):
                continue
            piece = self.layout[i]
            box = self.memory.storage(slot, piece.param)[index_in_storage(piece, piece.offset, piece.shape)]
            if signed(checksum(box)) != int(self.memory.sums[slot, :, k].sum()):
                raise damaged(piece.tensor, piece.offset, piece.shape)
