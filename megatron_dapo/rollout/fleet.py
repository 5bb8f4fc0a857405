"""Several rollout engines as one: a request goes to the least loaded, outlives its engine, and can be interrupted.

A request that is interrupted keeps its tokens, log-probs and weight versions, and goes on from them later, perhaps on
another engine and under newer weights. A dead engine's requests go to the others at once; it is started again, but
serves only after a push has brought it the current weights.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from hashlib import blake2b
from threading import Thread
from typing import Any, TypeVar

from megatron_dapo.rollout.async_engine import AsyncRolloutEngine
from megatron_dapo.rollout.client import EngineClient, EngineDied
from megatron_dapo.rollout.requests import SEED_BITS, Generation, GenerationRequest, added

log = logging.getLogger(__name__)
T = TypeVar("T")
LIVES = 3  # an engine that dies so often without finishing a single sample will not live
START_SECONDS = 600.0
POLL_SECONDS = 0.2


@dataclass
class Seat:
    """The place of one engine. `serving`: it is loaded and has the current weights. `deaths` since its last sample."""

    engine: AsyncRolloutEngine
    loaded: bool = False
    serving: bool = False
    load: int = 0
    deaths: int = 0

    @property
    def alive(self) -> bool:
        return self.engine.engine.alive


class Fleet:
    """Owns the engines and an event loop in a thread of its own, in which everything that generates runs."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        """The engines may still be loading."""
        self.seats = [Seat(AsyncRolloutEngine(engine)) for engine in engines]
        self.restarts = 0
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._held = False
        self._failure: EngineDied | None = None
        self._busy, self._busy_since = 0.0, 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._thread.start()
        for seat in self.seats:
            self._loop.call_soon_threadsafe(self._start, seat)

    def run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine in the fleet's loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def generate(self, request: GenerationRequest) -> Generation:
        """One sample, whatever happens to engines. Raises EngineError, and EngineDied at the end of all hope."""
        done: Generation | None = None
        while done is None or done.finish_reason == "abort":
            seat = await self._free_seat()
            engine = seat.engine
            self._count(seat, 1)
            try:
                part = await engine.generate(continuation(request, done))
            except EngineDied:
                self._lost(seat, engine)
                continue
            finally:
                self._count(seat, -1)
            seat.deaths = 0
            done = joined(request, done, part)
        return done

    async def generate_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    @property
    def in_flight(self) -> int:
        """Requests that engines are working on."""
        return sum(seat.load for seat in self.seats)

    def busy_seconds(self) -> float:
        """How long some engine has had work since the last time this was asked."""
        now = time.monotonic()
        total = self._busy + (now - self._busy_since if self.in_flight else 0.0)
        self._busy, self._busy_since = 0.0, now
        return total

    def wait_loaded(self) -> list[EngineClient]:
        """The living engines that have loaded, once there is one; replacements of dead ones are not waited for."""
        while True:
            self.sweep()
            loaded = [seat.engine.engine for seat in self.seats if seat.loaded]
            if loaded and all(seat.loaded or seat.deaths for seat in self.seats):
                return loaded
            time.sleep(POLL_SECONDS)

    @property
    def newcomers(self) -> bool:
        """Whether an engine waits for weights."""
        return any(seat.loaded and not seat.serving for seat in self.seats)

    def serve(self, engines: Sequence[EngineClient]) -> None:
        """These have the current weights now."""

        async def mark() -> None:
            for seat in self.seats:
                seat.serving = seat.serving or (seat.loaded and seat.engine.engine in engines)
            self._pulse()

        self.run(mark()).result()

    def hold(self) -> None:
        """Interrupt all requests and free the device: nothing is generated until `release`."""
        self.run(self._hold()).result()

    def wake(self, *parts: str) -> None:
        """Engines that gave their memory away take it again: "weights" before a push. # untested on GPU"""
        for seat in self.seats:
            if seat.loaded and seat.engine.engine.spec.sleeps:
                seat.engine.engine.wake(*parts)

    def release(self) -> None:
        """Interrupted requests go on."""
        self.wake("kv_cache")

        async def release() -> None:
            self._held = False
            self._pulse()

        self.run(release()).result()

    def sweep(self) -> None:
        """Notice engines that died while they had nothing to do. Raises EngineDied when one cannot be kept alive."""

        async def sweep() -> None:
            for seat in self.seats:
                if seat.loaded and not seat.alive:
                    self._lost(seat, seat.engine)

        self.run(sweep()).result()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the loop, so that nothing is started again, then the engines."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for seat in self.seats:
            seat.engine.engine.close()

    async def _free_seat(self) -> Seat:
        while True:
            if self._failure is not None:
                raise self._failure
            free = [seat for seat in self.seats if seat.serving and seat.alive]
            if free and not self._held:
                return min(free, key=lambda seat: seat.load)
            await self._changed.wait()

    def _pulse(self) -> None:
        """Everybody who waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _count(self, seat: Seat, change: int) -> None:
        before = self.in_flight
        seat.load += change
        if before == 0:
            self._busy_since = time.monotonic()
        elif self.in_flight == 0:
            self._busy += time.monotonic() - self._busy_since

    async def _hold(self) -> None:
        self._held = True
        await asyncio.sleep(0)  # what was just given to an engine is sent in this turn
        while self.in_flight:
            living = [seat.engine for seat in self.seats if seat.load and seat.alive]
            await asyncio.gather(*(engine.abort() for engine in living), return_exceptions=True)
            await asyncio.sleep(0)
        sleepers = [seat.engine.engine for seat in self.seats if seat.loaded and seat.engine.engine.spec.sleeps]
        await asyncio.gather(*(asyncio.to_thread(engine.sleep) for engine in sleepers))  # untested on GPU

    def _lost(self, seat: Seat, engine: AsyncRolloutEngine) -> None:
        """An engine is dead; the first to notice has it replaced."""
        if seat.engine is engine and seat.loaded:
            seat.loaded = seat.serving = False
            seat.deaths += 1
            self.restarts += 1
            log.warning("%s died; its requests go to others while it is started again", engine.engine.spec.name)
            self._start(seat)

    def _start(self, seat: Seat) -> None:
        task = self._loop.create_task(self._load(seat))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, seat: Seat) -> None:
        """Wait for an engine to load, for a new one in place of a dead one, and again when that dies on the way."""
        while seat.deaths < LIVES:
            try:
                if not seat.alive:
                    seat.engine = AsyncRolloutEngine(await asyncio.to_thread(seat.engine.engine.restart))
                await seat.engine.wait_ready(START_SECONDS)
                seat.loaded = True
                return
            except (EngineDied, TimeoutError) as error:
                seat.deaths += 1
                reason = error
                log.warning("%s", error)
        self._failure = EngineDied(f"{seat.engine.engine.spec.name} died {LIVES} times in a row: {reason}")
        self._pulse()


def continuation(request: GenerationRequest, done: Generation | None) -> GenerationRequest:
    """The rest of a request of which a part is done. Another seed: the old one's first numbers have been used."""
    if done is None or not done.token_ids:
        return request
    length = len(done.token_ids)
    digest = blake2b(f"{request.seed}\0{length}".encode(), digest_size=8).digest()
    return replace(
        request,
        request_id=f"{request.request_id}+{length}",
        prompt_ids=request.prompt_ids + done.token_ids,
        seed=int.from_bytes(digest, "little") >> (64 - SEED_BITS),
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - length),
    )


def joined(request: GenerationRequest, done: Generation | None, part: Generation) -> Generation:
    """One generation of what came before an interruption and what came after. The routing is that of the last part."""
    before = done or Generation(request.request_id, (), (), "abort", None, ())
    return replace(
        part,
        request_id=request.request_id,
        token_ids=before.token_ids + part.token_ids,
        logprobs=before.logprobs + part.logprobs,
        weight_versions=before.weight_versions + part.weight_versions,
        speculation=added(before.speculation, part.speculation),
    )
