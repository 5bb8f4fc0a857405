"""A rollout engine for asyncio: many coroutines generate, weights change in flight, nobody blocks the loop."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from megatron_dapo.rollout.client import EngineClient
from megatron_dapo.rollout.requests import Generation, GenerationRequest


class AsyncRolloutEngine:
    """Coroutines over one engine. Use it from one event loop.

    Requests made in the same turn of the loop travel as one message, so that a hundred agents cost what one batch does.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Generation]]] = []

    async def wait_ready(self, timeout: float | None = None) -> dict[str, Any]:
        return await asyncio.to_thread(self.engine.wait_ready, timeout)

    async def generate(self, request: GenerationRequest) -> Generation:
        """One sample. Cancelling the caller aborts the request. Raises EngineDied or EngineError."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        answer: asyncio.Future[Generation] = loop.create_future()
        self._waiting.append((request, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            if self.engine.alive:
                self.engine.abort_soon([request.request_id])
            raise

    async def generate_all(self, requests: Iterable[GenerationRequest]) -> list[Generation]:
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests (None: all); whoever waits for one gets what it has, finished by "abort"."""
        return await asyncio.wrap_future(self.engine.abort_soon(request_ids))

    async def pause(self) -> None:
        """Stop decoding; every request stays where it is, and new ones queue up."""
        await asyncio.to_thread(self.engine.pause)

    async def resume(self) -> None:
        await asyncio.to_thread(self.engine.resume)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Paused inside, running again after, whatever happens in between."""
        await self.pause()
        try:
            yield
        finally:
            await self.resume()

    async def update_weights(self, update: Any, version: int) -> list[dict[str, Any]]:
        """Load pushed weights between two decoding steps; requests in flight go on with them.

        Each token knows its version. Keys and values of the old weights are recomputed, not mixed in.
        """
        return await asyncio.to_thread(self.engine.update_weights, update, version)

    def _send(self) -> None:
        batch, self._waiting = self._waiting, []
        try:
            futures = self.engine.submit([request for request, _ in batch])
        except Exception as error:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for future, (_, answer) in zip(futures, batch, strict=True):
            chain(asyncio.wrap_future(future), answer)


def chain(source: "asyncio.Future[Generation]", target: "asyncio.Future[Generation]") -> None:
    """Hand the outcome of one future to another that may have been cancelled."""

    def done(finished: "asyncio.Future[Generation]") -> None:
        error = finished.exception()  # asking for it keeps asyncio from complaining that nobody did
        if target.cancelled():
            return
        if error is not None:
            target.set_exception(error)
        else:
            target.set_result(finished.result())

    source.add_done_callback(done)
