"""Weights by send and receive between trainer ranks and vLLM workers, on one host or many: gloo on CPU, NCCL on GPU.

All of them form a process group of their own, apart from Megatron's and vLLM's: sources first, destinations behind.
A round (see `messages`) is one message per pair. Everybody goes through (round, destination) in the same order, so
nobody waits in a circle; a sender packs one message while the one before it is on its way.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from megatron_dapo.models.slices import Layout
from megatron_dapo.resharding.layouts import Segment, segment
from megatron_dapo.resharding.messages import (
    DEFAULT_BUCKET_BYTES,
    Message,
    TransferError,
    empty_storages,
    from_json,
    messages,
    pack,
    storage_rounds,
    to_json,
    unpack,
)
from megatron_dapo.resharding.parts import Parts, dtypes_of, in_parts
from megatron_dapo.resharding.plan import Transfer, plan


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a push find each other. `name` tells one group from the next at the same place."""

    host: str
    port: int
    name: str
    sources: int
    destinations: int
    backend: str = "gloo"  # | "nccl"
    timeout_seconds: float = 300.0
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    check_every: int = 1

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"


def own_address() -> str:
    """The address at which other hosts reach this one; loopback where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: nothing is sent there
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


CALLED_OFF = "called off"
POLL_SECONDS = 0.01


def open_store(meeting: Meeting, master: bool) -> Store:
    timeout = timedelta(seconds=meeting.timeout_seconds)
    store = TCPStore(meeting.host, meeting.port, is_master=master, timeout=timeout, wait_for_workers=False)
    return PrefixStore(meeting.name, store)


def call_off(meeting: Meeting, reason: str) -> None:
    """Tell everybody who waits at the meeting, or will, that somebody does not come."""
    with contextlib.suppress(RuntimeError):  # nobody ever waited there
        open_store(meeting, master=False).set(CALLED_OFF, reason)


class PeerGroup:
    """The process group of a push. Rank 0, a source, keeps the store."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        timeout = timedelta(seconds=meeting.timeout_seconds)
        self.store = open_store(meeting, master=rank == 0)
        size = meeting.sources + meeting.destinations
        self._wait_for_all(size, meeting.timeout_seconds)
        if meeting.backend == "nccl":  # untested on GPU
            from torch._C._distributed_c10d import ProcessGroupNCCL

            self.group: Any = ProcessGroupNCCL(self.store, rank, size, ProcessGroupNCCL.Options())
        else:
            self.group = ProcessGroupGloo(self.store, rank, size, timeout)

    def _wait_for_all(self, size: int, seconds: float) -> None:
        """Building the group waits for everybody, deaf to anything else; here one hears that the push is called off."""
        self.store.set(f"here {self.rank}", "")
        keys = [f"here {rank}" for rank in range(size)]
        deadline = time.monotonic() + seconds
        while not self.store.check(keys):
            if self.store.check([CALLED_OFF]):
                raise TransferError(f"the push was called off: {self.store.get(CALLED_OFF).decode()}")
            if time.monotonic() > deadline:
                absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise TransferError(f"members {absent} of {size} did not come to a push within {seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def send(self, part: Tensor, to: int, tag: int) -> Any:
        return self.group.send([part], to, tag)

    def receive(self, part: Tensor, sender: int, tag: int) -> Any:
        return self.group.recv([part], sender, tag)


@dataclass(frozen=True)
class Outgoing:
    """One message of this rank, with what it takes to pack it."""

    round: int
    destination: int  # rank in the group
    message: Message
    transfers: Sequence[Transfer]
    parts: Parts  # the destination's


class PeerPublisher:
    """The trainer's side, on one rank. Every rank constructs it, with its own first three arguments."""

    def __init__(
        self,
        rank: int,
        my_layout: Layout,
        my_params: Callable[[str], Tensor],
        all_sources: Mapping[int, Layout],
        destinations: Mapping[int, Layout],
        meeting: Meeting,
        *,
        dtypes: Mapping[str, str],
    ) -> None:
        """Pure until the first `send`. Raises PlanError where the sources cannot serve a destination."""
        self.layout, self.params, self.meeting, self.dtypes = my_layout, my_params, meeting, dtypes
        self.pushes = 0
        self.index, self.destinations = sorted(all_sources).index(rank), destinations
        self.outgoing: list[Outgoing] = []
        self.group: PeerGroup | None = None
        parts = in_parts(destinations, dtypes, meeting.bucket_bytes)
        sends = plan(all_sources, {d: made.layout for d, made in parts.items()}).sends(rank)
        for place, (destination, made) in enumerate(sorted(parts.items())):
            rounds = storage_rounds(made.place, meeting.bucket_bytes)
            mine = [t for t in sends if t.destination == destination]
            for r, (message, transfers) in messages(mine, made.layout, made.dtypes, rounds).items():
                self.outgoing.append(Outgoing(r, meeting.sources + place, message, transfers, made))
        self.outgoing.sort(key=lambda out: (out.round, out.destination))

    def update(self) -> list[dict[str, Any]]:
        """What `RolloutEngine.update_weights_soon` takes for every push of this meeting, per destination."""
        return peer_update(self.meeting, self.destinations, self.dtypes)

    def send(self) -> int:
        """Send everything; returns bytes. Meanwhile the driver has called `RolloutEngine.update_weights`.

        Raises TransferError when a destination is gone.
        """
        try:
            group = self._join()
            size = max((out.message.nbytes for out in self.outgoing), default=0)
            buffers = [torch.empty(size, dtype=torch.uint8, device=self.meeting.device) for _ in range(2)]
            under_way: list[Any] = [None, None]
            for i, out in enumerate(self.outgoing):
                if under_way[i % 2] is not None:
                    under_way[i % 2].wait()
                part = pack(
                    out.message,
                    out.transfers,
                    self.layout,
                    out.parts.layout,
                    self.params,
                    out.parts.dtypes,
                    buffers[i % 2],
                    self.pushes,
                    self.meeting.check_every,
                )
                under_way[i % 2] = group.send(part, out.destination, out.round)
            for work in under_way:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            self.close()
            raise TransferError(f"source {self.index} could not complete a push of weights: {error}") from error
        self.pushes += 1
        return sum(out.message.nbytes for out in self.outgoing)

    def _join(self) -> PeerGroup:
        if self.group is None:
            self.group = PeerGroup(self.meeting, self.index)
            for place in range(self.meeting.destinations):
                rounds = {o.round: o.message for o in self.outgoing if o.destination == self.meeting.sources + place}
                self.group.store.set(f"{self.index}-{place}", json.dumps(to_json(rounds)))
        return self.group

    def close(self) -> None:
        self.group = None


def peer_update(
    meeting: Meeting, destinations: Mapping[int, Layout], dtypes: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What `RolloutEngine.update_weights` takes, for all destinations in order; an engine gets the part that is its."""
    return [
        {
            "transport": "peers",
            "digest": segment(layout, dtypes).digest,
            "details": asdict(meeting) | {"place": place},
        }
        for place, (_, layout) in enumerate(sorted(destinations.items()))
    ]


class PeerReceiver:
    """The vLLM worker's side."""

    def __init__(self, layout: Layout, place: Segment, details: Mapping[str, Any]) -> None:
        plain = dict(details)
        number = plain.pop("place")
        self.meeting = Meeting(**plain)
        self.parts, self.pushes = Parts.of(layout, dtypes_of(place), self.meeting.bucket_bytes), 0
        self.group = PeerGroup(self.meeting, self.meeting.sources + number)
        sources = range(self.meeting.sources)
        self.received = 0  # bytes of the last push, with their checksums
        self.incoming = {s: from_json(json.loads(self.group.store.get(f"{s}-{number}"))) for s in sources}

    def serves(self, details: Mapping[str, Any]) -> bool:
        """Whether this receiver is still in the group that a new push names."""
        return self.meeting.name == details["name"]

    def storages(self) -> Iterator[tuple[str, Tensor]]:
        """Every storage, complete, one after the other. The next round travels while the caller uses this one."""
        return self.parts.joined(self._rounds())

    def _rounds(self) -> Iterator[tuple[str, Tensor]]:
        rounds = storage_rounds(self.parts.place, self.meeting.bucket_bytes)
        self.received = 0
        coming = self._post(0)
        for r, params in enumerate(rounds):
            current, coming = coming, self._post(r + 1)
            held = empty_storages(self.parts.place, params, self.meeting.device)
            for message, buffer, work in current:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise TransferError(f"a trainer rank stopped sending in round {r}: {error}") from error
                unpack(message, buffer, self.parts.layout, held, self.pushes, self.meeting.check_every)
                self.received += message.nbytes
            yield from held.items()
        self.pushes += 1

    def _post(self, r: int) -> list[tuple[Message, Tensor, Any]]:
        posted = []
        for source, sent in self.incoming.items():
            if r in sent:
                buffer = torch.empty(sent[r].nbytes, dtype=torch.uint8, device=self.meeting.device)
                posted.append((sent[r], buffer, self.group.receive(buffer, source, r)))
        return posted
