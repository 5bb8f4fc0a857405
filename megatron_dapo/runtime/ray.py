"""A run's processes under Ray: a cluster to join or start, a pool of slots in it, and the ranks as actors in a pool.

The driver is a process of its own and holds no model. Everything that it starts here ends with it.
"""

import logging
import multiprocessing
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_dapo.errors import UserError
from megatron_dapo.runtime.queue import set_environment

ADDRESS_VARIABLE = "RAY_ADDRESS"
NODES_VARIABLE = "RAY_NODES"  # how many a launcher starts: they do not join in one moment
LOCAL = "local"
CONNECT_SECONDS = 5.0
LOCAL_STORE_BYTES = 512 * 2**20  # of a Ray that we start: batches only; weights travel elsewhere
PLACE_SECONDS = 120.0  # how long a cluster may take to free what it has
START_SECONDS = 900.0
CLOSE_SECONDS = 30.0
BROKEN_CLOSE_SECONDS = 5.0  # after a failure a rank may hang in a collective that never ends
HEARING_SECONDS = 3.0  # after a rank failed: how long to listen for the one that it failed for

Resources = Mapping[str, float]


class RankDied(RuntimeError):
    """A rank's process or its node is gone."""


@contextmanager
def cluster(cpus: int) -> Iterator[None]:
    """Inside, this process is a driver of the cluster at RAY_ADDRESS, or of a Ray of its own with at least `cpus`.

    A Ray of our own ends with the block or with this process. Raises UserError where no cluster can be reached.
    """
    where = address()
    if where == LOCAL:
        cpus = max(cpus, len(os.sched_getaffinity(0)))
        own = {"num_cpus": cpus, "object_store_memory": LOCAL_STORE_BYTES, "include_dashboard": False}
    else:
        own = {}
    try:
        set_environment()  # a Ray of our own inherits it
        ray.init(address=where, logging_level=logging.WARNING, **own)
    except ConnectionError as error:
        raise UserError(
            f"{ADDRESS_VARIABLE}={where}: this is no Ray cluster that lets us join ({error}). If it asks for a token, "
            "set RAY_AUTH_MODE=token; the token is read from ~/.ray/auth_token"
        ) from error
    try:
        _wait_for_nodes(int(os.environ.get(NODES_VARIABLE) or 1))
        yield
    finally:
        ray.shutdown()


def address() -> str:
    """Where the cluster is, by RAY_ADDRESS; LOCAL where that is not set. Raises UserError where nothing listens."""
    given = os.environ.get(ADDRESS_VARIABLE, "")
    if given in ("", LOCAL, "auto"):
        return given or LOCAL
    host, _, port = given.rpartition(":")
    if "://" in given or not port.isdigit():
        raise UserError(
            f"{ADDRESS_VARIABLE}={given}: a driver runs on a node of its cluster and needs host:port (as `ray start` "
            "prints it). From outside submit a job: launch/ray/submit.sh"
        )
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"{ADDRESS_VARIABLE}={given}: nothing answers there ({error}). Start a cluster with `ray start --head`, or "
            f"unset {ADDRESS_VARIABLE} to have one started for this run"
        ) from error
    return given


def _wait_for_nodes(count: int) -> None:
    deadline = time.monotonic() + PLACE_SECONDS
    while len(live_nodes()) < count:
        if time.monotonic() > deadline:
            raise UserError(
                f"{NODES_VARIABLE}={count}: only {len(live_nodes())} nodes joined the Ray cluster in "
                f"{PLACE_SECONDS:.0f} s. See the logs of the others"
            )
        time.sleep(0.5)


def check_size(need: Resources) -> None:
    """Raises UserError for what the whole cluster does not have."""
    total = ray.cluster_resources()
    missing = {name: amount for name, amount in need.items() if amount > total.get(name, 0.0)}
    if missing:
        words = ", ".join(f"{amount:g} {name} (it has {total.get(name, 0.0):g})" for name, amount in missing.items())
        raise UserError(
            f"the Ray cluster of {len(live_nodes())} nodes is too small: this run needs {words}. Add nodes, or lower "
            "parallel.world_size or rollout.engines"
        )


def live_nodes() -> dict[str, str]:
    """Node id → address of every living node."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


@dataclass(frozen=True)
class Slot:
    """Where one actor goes: a bundle of a placement group. `number` counts the slots of its node."""

    group: PlacementGroup
    bundle: int
    node: str
    address: str
    number: int
    resources: Resources

    def shared(self) -> "Slot":
        """The same place, for another actor beside the one that takes it all."""
        return replace(self, resources=dict.fromkeys(self.resources, 0.0))

    def options(self, **more: Any) -> dict[str, Any]:
        """Options of an actor that takes the whole slot, runs once, and is not started again by Ray."""
        custom = {name: amount for name, amount in self.resources.items() if name not in ("CPU", "GPU")}
        if "GPU" in self.resources:  # untested on GPU
            more["runtime_env"] = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        return {
            "num_cpus": self.resources.get("CPU", 0.0),
            "num_gpus": self.resources.get("GPU", 0.0),
            "resources": custom,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundle),
            **more,
        }


@dataclass(frozen=True)
class Pool:
    """Slots that are taken all at once or not at all, in rank order: those of one node are neighbours."""

    group: PlacementGroup
    slots: tuple[Slot, ...]

    @classmethod
    def take(cls, count: int, each: Resources, strategy: str = "PACK") -> "Pool":
        """`count` slots with `each` of the resources, on as few nodes as possible (SPREAD: as many).

        Raises UserError where the cluster has not so much, or does not free it in time.
        """
        check_size({name: count * amount for name, amount in each.items()})
        group = placement_group([dict(each)] * count, strategy=strategy)
        if not group.wait(PLACE_SECONDS):
            remove_placement_group(group)
            words = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
            raise UserError(
                f"the Ray cluster did not free {count} x ({words}) in {PLACE_SECONDS:.0f} s: it has "
                f"{_spare()} to spare. Wait for other jobs, or add nodes"
            )
        nodes, places = live_nodes(), placement_group_table(group)["bundles_to_node_id"]
        fullest = [node for node, _ in Counter(places.values()).most_common()]
        order = sorted(range(count), key=lambda bundle: (fullest.index(places[bundle]), bundle))
        slots: list[Slot] = []
        for bundle in order:
            node = places[bundle]
            number = sum(slot.node == node for slot in slots)
            slots.append(Slot(group, bundle, node, nodes[node], number, dict(each)))
        return cls(group, tuple(slots))

    def release(self) -> None:
        """Gives the slots back; what runs in them ends."""
        with suppress(Exception):  # a cluster that is gone has nothing to be given back to
            remove_placement_group(self.group)


def _spare() -> str:
    spare = ray.available_resources()
    return ", ".join(f"{spare[name]:g} {name}" for name in ("CPU", "GPU") if name in spare) or "nothing"


class RankActor:
    """One Megatron rank: the environment of its place in the world, and the worker that was built there."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Nothing has imported torch yet: the number of its threads can still be set."""
        os.environ.update(environment)
        if "OMP_NUM_THREADS" not in environment:  # Ray has set 1 per CPU of the slot
            share = len(os.sched_getaffinity(0)) // int(environment["LOCAL_WORLD_SIZE"])
            os.environ["OMP_NUM_THREADS"] = str(max(1, share))

    def free_port(self) -> int:
        """A port of this rank's node that nobody listens on now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def devices(self) -> list[int]:
        """The GPUs that Ray gave us, by their numbers on the node."""
        return [int(number) for number in ray.get_gpu_ids()]

    def build(self, environment: Mapping[str, str], build: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
        """Makes the worker and returns our process id."""
        os.environ.update(environment)
        self.worker = build(*arguments)
        return os.getpid()

    def call(self, method: str, has_share: bool, share: Any, common: dict[str, Any]) -> Any:
        return methodcaller(method, *([share] if has_share else []), **common)(self.worker)

    def close(self) -> None:
        """What a rank leaves behind goes first: engines, shared memory, the helpers of checkpointing."""
        self.worker.close()
        for child in multiprocessing.active_children():
            child.kill()


class RayWorkerGroup:
    """The driver's side of ranks that are actors: the `WorkerGroup` of a run under Ray."""

    def __init__(self, pool: Pool, actors: Sequence[Any]) -> None:
        self._pool, self._actors = pool, list(actors)
        self.size = len(self._actors)
        self.pids: list[int] = []
        self.devices: list[list[int]] = []  # of each rank: its GPUs, by their numbers on its node
        self._broken = False

    @classmethod
    def start(
        cls, pool: Pool, build: Callable[..., Any], arguments: tuple[Any, ...], threads: int | None = None
    ) -> "RayWorkerGroup":
        """One rank in every slot, each with `build(*arguments)` as its worker, in one world of torch.distributed.

        The actors import `build` by its name. `threads` are those of a rank's computations; None: what this driver was
        told by OMP_NUM_THREADS, else the cores of the node shared among its ranks. On GPU every rank sees all devices
        of its node, and its LOCAL_RANK is the number of the one that Ray gave it # untested on GPU
        """
        told = os.environ.get("OMP_NUM_THREADS") if threads is None else str(threads)
        world, environments = len(pool.slots), []
        for rank, slot in enumerate(pool.slots):
            neighbours = sum(other.node == slot.node for other in pool.slots)
            environments.append(
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(slot.number),
                    "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(neighbours),
                    "MASTER_ADDR": pool.slots[0].address,
                    **({} if told is None else {"OMP_NUM_THREADS": told}),
                }
            )
        remote = ray.remote(RankActor)
        actors = [
            remote.options(**slot.options()).remote(environment)
            for slot, environment in zip(pool.slots, environments, strict=True)
        ]
        group = cls(pool, actors)
        try:
            port = group._gather([actors[0].free_port.remote()], START_SECONDS, "start")[0]
            place = {"MASTER_PORT": str(port)}
            group.devices = group._gather([actor.devices.remote() for actor in actors], START_SECONDS, "start")
            places = [place | ({"LOCAL_RANK": str(own[0])} if own else {}) for own in group.devices]
            building = [actor.build.remote(at, build, arguments) for actor, at in zip(actors, places, strict=True)]
            group.pids = group._gather(building, START_SECONDS, "build")
        except BaseException:
            group.close()
            raise
        return group

    def call(self, method: str, shares: Sequence[Any] | None = None, **common: Any) -> list[Any]:
        """See `WorkerGroup.call`. Raises what the first failing rank raised, or RankDied."""
        dealt = [None] * self.size if shares is None else list(shares)
        if len(dealt) != self.size:
            raise ValueError(f"{method}: {len(dealt)} shares for {self.size} ranks")
        calls = [
            actor.call.remote(method, shares is not None, share, common)
            for actor, share in zip(self._actors, dealt, strict=True)
        ]
        return self._gather(calls, None, method)

    def close(self) -> None:
        """Lets every rank that still answers clean up, then ends them all. May be called twice."""
        closing = [actor.close.remote() for actor in self._actors]
        with suppress(Exception):  # a dead rank has nothing to say here
            grace = BROKEN_CLOSE_SECONDS if self._broken else CLOSE_SECONDS
            ray.wait(closing, num_returns=len(closing), timeout=grace)
        for actor in self._actors:
            with suppress(Exception):
                ray.kill(actor)
        self._actors = []
        self._pool.release()

    def _gather(self, calls: list[Any], timeout: float | None, what: str) -> list[Any]:
        """Results by rank. After the first failure the others get a moment to tell of a better reason."""
        ranks = {call: rank for rank, call in enumerate(calls)}
        results: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = list(calls)
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if not done:
                break
            try:
                results[ranks[done[0]]] = ray.get(done[0])
            except Exception as error:  # sorted out below
                failures[ranks[done[0]]] = error
                deadline = min(deadline or float("inf"), time.monotonic() + HEARING_SECONDS)
        if failures:
            self._broken = True
            raise _reason(failures, what)
        if waiting:
            silent = sorted(ranks[call] for call in waiting)
            raise RankDied(f"ranks {silent} have not answered `{what}` for {timeout or 0:.0f} s")
        return [results[rank] for rank in range(len(calls))]


def _reason(failures: Mapping[int, Exception], what: str) -> Exception:
    """The failure that explains the others: a death, else a mistake of the user, else what came first."""
    for rank, error in failures.items():
        if isinstance(error, RayActorError):
            return RankDied(f"rank {rank} died during `{what}`: {in_one_line(error)}")
    causes = [(rank, cause_of(error)) for rank, error in failures.items()]
    rank, chosen = next(((r, e) for r, e in causes if isinstance(e, UserError)), causes[0])
    if not isinstance(chosen, UserError):
        chosen.add_note(f"on rank {rank} during `{what}`:\n{failures[rank]}")
    return chosen


def cause_of(error: Exception) -> Exception:
    """What an actor's method raised, out of Ray's wrapping."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


def in_one_line(error: Exception) -> str:
    """Ray's words on a death, without its advice."""
    text = str(error).strip()
    return " ".join(line.strip() for line in text.splitlines()[:6])
