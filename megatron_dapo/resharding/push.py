"""A push to rollout engines wherever they run: which way the weights travel, and who does what when.

The driver chooses a `Route` for a set of engines; every rank keeps a `Sender` for it. A push is three steps: every rank
prepares, the driver tells each engine its update, and every rank sends while the engines take what comes.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from threading import Thread
from typing import Any, Protocol
from uuid import uuid4

from torch import Tensor

from megatron_dapo.errors import UserError
from megatron_dapo.models.slices import Layout
from megatron_dapo.resharding.layouts import ITEM_SIZE, share_equal
from megatron_dapo.resharding.memory import host_identity, unlink
from megatron_dapo.resharding.messages import DEFAULT_BUCKET_BYTES
from megatron_dapo.resharding.parts import in_parts
from megatron_dapo.resharding.plan import PlanError
from megatron_dapo.resharding.transport_files import FilePublisher, file_update
from megatron_dapo.resharding.transport_ipc import ExportedSlots, open_slots
from megatron_dapo.resharding.transport_peers import Meeting, PeerPublisher, call_off, free_port, own_address
from megatron_dapo.resharding.transport_ring import Ring, RingPublisher, give_up
from megatron_dapo.resharding.transport_shm import WeightPublisher, weight_update

log = logging.getLogger(__name__)
CASTS = ("float32", "bfloat16", "float16")  # what a sender can cast to
IN_MEMORY = ("shared_memory", "ring", "cuda_ipc")  # of one host
Update = list[dict[str, Any]]  # what one engine must know of one push, an entry for each of its ranks


class PushFailed(RuntimeError):
    """A push did not reach every engine. `engines`: the numbers of those that have no complete weights now."""

    def __init__(self, reasons: Sequence[str], engines: Sequence[int]) -> None:
        super().__init__("the push of weights failed: " + "; ".join(reasons))
        self.engines = tuple(engines)


@dataclass(frozen=True)
class Pushed:
    """What one rank did in a push: bytes, why its own part failed, and why the engine that it hosts did."""

    sent: int
    received: int = 0  # by the engine that it hosts
    reasons: tuple[str, ...] = ()
    engine_error: str | None = None


@dataclass(frozen=True)
class Target:
    """One rollout engine as a push sees it: its host, what each of its ranks stores, and the storages' dtypes.

    `whole`: HF tensors in layers that the bridge does not know, which every rank is sent in full. `colocated`: it is on
    the trainer's own GPUs.
    """

    host: str
    layouts: tuple[Layout, ...]
    dtypes: Mapping[str, str]
    whole: tuple[str, ...] = ()
    colocated: bool = False


class PushEngine(Protocol):
    """What a push needs of an engine. `RolloutEngine` is one; so is whatever stands for one in another process."""

    def target(self) -> Target: ...

    def export_slots(self, nbytes: int) -> list[ExportedSlots]: ...

    def update_weights_soon(self, update: Update, version: int) -> "Future[list[dict[str, Any]]]": ...


@dataclass(frozen=True)
class Standpoint:
    """Where a rank runs, and an address and a port at which others could reach it."""

    host: str
    address: str
    port: int

    @classmethod
    def here(cls) -> "Standpoint":
        address = own_address()
        return cls(host_identity(), address, free_port(address))


@dataclass(frozen=True)
class Route:
    """How weights travel to a set of engines, the same on every rank. `destinations`: all engines' ranks, in order."""

    transport: str  # "shared_memory" | "ring" | "cuda_ipc" | "peers" | "files"
    place: str | Meeting  # what the shared files' paths begin with, where peers meet, or the directory of the files
    destinations: Mapping[int, Layout]
    dtypes: Mapping[str, str]
    widths: tuple[int, ...]  # ranks of each engine
    bucket_bytes: int = DEFAULT_BUCKET_BYTES  # of a round, where the transport has rounds
    check_every: int = 1  # of the slices, how many are compared in a push: each, or every nth
    slots: tuple[ExportedSlots, ...] = ()  # of all destinations, where they lie on GPUs

    @property
    def slots_bytes(self) -> int:
        """What each destination must lend of its GPU's memory."""
        return max(
            Ring.of(made.layout, made.place, 1, self.bucket_bytes).slots_bytes
            for made in in_parts(self.destinations, self.dtypes, self.bucket_bytes).values()
        )

    @cached_property
    def stored(self) -> int:
        """Bytes of the weights that all engines' ranks keep: no push can do with fewer."""
        distinct = {id(layout): layout for layout in self.destinations.values()}
        sizes = {
            key: sum(piece.numel * ITEM_SIZE[self.dtypes[piece.param]] for piece in layout)
            for key, layout in distinct.items()
        }
        return sum(sizes[id(layout)] for layout in self.destinations.values())

    def updates(self, receipts: Iterable[Any]) -> list[Update]:
        """What each engine takes, from what `Sender.prepare` returned on all ranks."""
        if self.transport == "shared_memory":
            parts = weight_update(receipts)
        elif self.transport == "files":
            parts = file_update(receipts)
        else:
            parts = list(receipts)
        ends = accumulate(self.widths, initial=0)
        return [parts[start:end] for start, end in pairwise(ends)]

    def hide(self) -> None:
        """Take their names from shared files that all ranks have open by now: nothing is left after a crash."""
        if self.transport in IN_MEMORY:
            unlink(f"{self.place}-{d}" for d in self.destinations)

    def start(self, engine: PushEngine, update: Update, version: int) -> "Future[list[dict[str, Any]]]":
        """Let an engine begin to take a push. Should it fail, the senders hear of it and do not wait for it."""
        try:
            future = engine.update_weights_soon(update, version)
        except RuntimeError as error:  # it is dead already
            future = Future()
            future.set_exception(error)
        future.add_done_callback(partial(self._release, update))
        return future

    def _release(self, update: Update, future: "Future[Any]") -> None:
        error = future.exception()
        if error is None:
            return
        if isinstance(self.place, Meeting):  # in the background: the meeting opens when the ranks begin to send
            Thread(target=call_off, args=(self.place, str(error).partition("\n")[0]), daemon=True).start()
        elif self.transport in ("ring", "cuda_ipc"):
            for part in update:
                give_up(part["details"])


def received_bytes(taken: "Future[list[dict[str, Any]]]") -> int:
    """Bytes that the ranks of one engine counted in a push that they have taken."""
    return sum(report["bytes_received"] for report in taken.result())


def choose_route(
    ranks: Sequence[Standpoint],
    engines: Sequence[Target],
    shapes: Mapping[str, tuple[int, ...]],
    transport: str = "auto",
    backend: str = "gloo",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    check_every: int = 1,
    directory: str = "",
) -> Route:
    """Memory where all ranks and engines are on one host, else send and receive with `backend`.

    That memory is the engines' GPU memory where they are on the trainer's GPUs. `directory` is for `files`.
    `shapes` are the HF tensors of the trained model. Raises PlanError for an engine that does not store just these,
    UserError for a `transport` that cannot reach one.
    """
    destinations = share_equal(dict(enumerate(layout for engine in engines for layout in engine.layouts)))
    widths = tuple(len(engine.layouts) for engine in engines)
    hosts = {rank.host for rank in ranks} | {engine.host for engine in engines}
    if transport == "auto":
        on_gpus = backend == "nccl" and all(engine.colocated for engine in engines)  # untested on GPU
        transport = "peers" if len(hosts) > 1 else "cuda_ipc" if on_gpus else "shared_memory"
    if transport == "cuda_ipc" and backend != "nccl":
        raise UserError("rollout.weight_transport=cuda_ipc needs GPUs: choose auto or shared_memory")
    if transport in IN_MEMORY and len(hosts) > 1:
        raise UserError(
            f"rollout.weight_transport={transport}: the trainer's ranks and the rollout engines are on {len(hosts)} "
            "hosts, which share no memory; choose auto, peers or files"
        )
    if any(engine.colocated for engine in engines):
        backend = "gloo"  # one GPU cannot be two members of an NCCL group
    _check(shapes, engines, destinations, widths)
    for name in sorted({name for engine in engines for name in engine.whole}):
        log.warning("%s lies in a vLLM layer that the bridge does not know: every rank is sent all of it", name)
    name, place = f"megatron_dapo-{uuid4().hex[:12]}", ranks[0]
    meeting = Meeting(
        place.address,
        place.port,
        name,
        len(ranks),
        sum(widths),
        backend=backend,
        bucket_bytes=bucket_bytes,
        check_every=check_every,
    )
    where: str | Meeting = f"/dev/shm/{name}" if transport in IN_MEMORY else f"{directory}/{name}"
    if transport == "peers":
        where = meeting
    return Route(transport, where, destinations, engines[0].dtypes, widths, bucket_bytes, check_every)


def _check(
    shapes: Mapping[str, tuple[int, ...]],
    engines: Sequence[Target],
    destinations: Mapping[int, Layout],
    widths: Sequence[int],
) -> None:
    """Engines must agree with the trained model, and with each other on dtypes; equal ones are looked at once."""
    checked = set()
    for engine, (start, end) in zip(engines, pairwise(accumulate(widths, initial=0)), strict=True):
        layouts = [destinations[d] for d in range(start, end)]
        if tuple(map(id, layouts)) not in checked:
            checked.add(tuple(map(id, layouts)))
            check_same_model(shapes, layouts)
        for param, dtype in engine.dtypes.items():
            if dtype not in CASTS:
                raise PlanError(
                    f"the rollout engine keeps {param} as {dtype}, and a push casts to {', '.join(CASTS)} only: start "
                    "the engine without quantization"
                )
            if engines[0].dtypes.get(param, dtype) != dtype:
                raise PlanError(
                    f"one rollout engine keeps {param} as {dtype}, another as {engines[0].dtypes[param]}: give all "
                    "engines the same rollout.dtype"
                )


def check_same_model(shapes: Mapping[str, tuple[int, ...]], engine: Sequence[Layout]) -> None:
    """Whether the ranks of an engine store the tensors `shapes` of the trained model. Raises PlanError naming one."""
    stored: dict[str, tuple[int, ...]] = {}
    for layout in engine:
        for piece in layout:
            end = tuple(o + n for o, n in zip(piece.offset, piece.shape, strict=True))
            known = stored.get(piece.tensor)
            stored[piece.tensor] = end if known is None or len(known) != len(end) else tuple(map(max, known, end))
    way_out = "it was started from another config.json than the trainer"
    lacking, foreign = [n for n in shapes if n not in stored], [n for n in stored if n not in shapes]
    for names, says in ((lacking, "does not store"), (foreign, "stores a tensor the trained model lacks,")):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise PlanError(f"the rollout engine {says} {names[0]}{more}: {way_out}")
    for name, shape in shapes.items():
        if stored[name] != shape:
            raise PlanError(
                f"{name} has shape {shape} in the trained model and {stored[name]} in the rollout engine: {way_out}"
            )


Publisher = WeightPublisher | RingPublisher | PeerPublisher | FilePublisher
PUBLISHERS: dict[str, type[Publisher]] = {
    "shared_memory": WeightPublisher,
    "ring": RingPublisher,
    "cuda_ipc": RingPublisher,
    "peers": PeerPublisher,
    "files": FilePublisher,
}


class Sender:
    """One rank's part of every push along a route. Every rank constructs it, then plans it, once."""

    def __init__(self, rank: int, sources: Mapping[int, Layout], params: Callable[[str], Tensor], route: Route) -> None:
        """`params` gives this rank's storage of a name. Raises PlanError where the sources cannot serve an engine."""
        options: dict[str, Any] = {"dtypes": route.dtypes}
        if route.transport != "peers":  # the meeting knows it
            options["check_every"] = route.check_every
        if route.transport in ("ring", "cuda_ipc", "files"):
            options["bucket_bytes"] = route.bucket_bytes
        if route.transport == "cuda_ipc":  # untested on GPU
            options["slots"] = dict(zip(route.destinations, map(open_slots, route.slots), strict=True))
        place: Any = route.place  # each kind has its own
        self.first = rank == min(sources)
        self.publisher: Publisher = PUBLISHERS[route.transport](
            rank, sources[rank], params, sources, route.destinations, place, **options
        )
        self.written = 0

    def prepare(self) -> list[Any]:
        """What can be done before the engines know; the results of all ranks go to `Route.updates`."""
        if isinstance(self.publisher, WeightPublisher | FilePublisher):
            receipts: list[Any] = [*self.publisher.write()]
            self.written = sum(receipt.written for receipt in receipts)
            return receipts
        return self.publisher.update() if self.first else []

    def send(self) -> int:
        """The rest, while the engines receive. Returns the bytes this rank gave to the push. Raises TransferError."""
        if isinstance(self.publisher, WeightPublisher | FilePublisher):
            return self.written
        return self.publisher.send()

    def close(self) -> None:
        self.publisher.close()
