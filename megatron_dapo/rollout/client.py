"""What whoever uses a rollout engine can ask of it, wherever its process runs: here, or behind a Ray actor."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

from megatron_dapo.resharding.push import Target
from megatron_dapo.resharding.transport_ipc import ExportedSlots
from megatron_dapo.rollout.requests import Generation, GenerationRequest
from megatron_dapo.rollout.spec import EngineSpec
from megatron_dapo.rollout.wire import pack_requests


class EngineDied(RuntimeError):
    """The process of a rollout engine is gone; what it was generating is lost."""


class EngineError(RuntimeError):
    """A rollout engine refused or failed one command; the engine itself lives on."""


class EngineClient(ABC):
    """One engine, seen from its owner. Thread-safe: any thread may submit, another hands out the answers."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.weight_version = 0
        self._state = threading.Lock()
        self._generations: dict[str, Future[Generation]] = {}
        self._death: EngineDied | None = None
        self._closing = False

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can still be asked."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """The engine's process on its node."""

    @abstractmethod
    def restart(self) -> "EngineClient":
        """A new engine in place of this one."""

    @abstractmethod
    def wait_ready(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until vLLM has loaded. Raises EngineDied if it could not start, TimeoutError after `timeout` seconds."""

    @abstractmethod
    def target(self) -> Target:
        """What a push must know of this engine."""

    @abstractmethod
    def close(self) -> None:
        """End the process and its workers. May be called twice."""

    @abstractmethod
    def _call(self, command: str, *arguments: Any) -> "Future[Any]":
        """Send one command; the future has its answer."""

    def _send(self, packed: dict[str, Any]) -> "Future[Any]":
        """Send packed requests; the future ends once vLLM has taken or refused them."""
        return self._call("submit", packed)

    def submit(self, requests: Sequence[GenerationRequest]) -> list["Future[Generation]"]:
        """Queue requests and return one future each, in order, at once. They finish whenever their sample does.

        A submission that vLLM refuses fails as a whole: each of its futures raises EngineError.
        """
        futures: dict[str, Future[Generation]] = {request.request_id: Future() for request in requests}
        with self._state:
            self._raise_if_dead()
            taken = next((i for i in futures if i in self._generations), None)
            if taken is not None or len(futures) < len(requests):
                raise ValueError(f"{self.spec.name}: request id {taken or '(in this call)'} is used twice")
            self._generations.update(futures)
        self._send(pack_requests(requests)).add_done_callback(partial(self._refuse, futures))
        return list(futures.values())

    def _refuse(self, futures: dict[str, "Future[Generation]"], answer: "Future[Any]") -> None:
        error = answer.exception()
        if error is None:
            return
        for request_id, future in futures.items():
            with self._state:
                self._generations.pop(request_id, None)
            if not future.done():
                future.set_exception(error)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Sample every request; results in the order of the requests."""
        return [future.result() for future in self.submit(requests)]

    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests (None: all); their futures get what was sampled, with finish_reason "abort"."""
        return self.abort_soon(request_ids).result()

    def abort_soon(self, request_ids: Sequence[str] | None = None) -> "Future[int]":
        """Like `abort`, without waiting. The result is how many of them were still running."""
        return self._call("abort", None if request_ids is None else list(request_ids))

    def pause(self) -> None:
        """Stop decoding and keep every request where it is."""
        self._call("pause").result()

    def resume(self) -> None:
        self._call("resume").result()

    def sleep(self) -> None:
        """Give the GPU's memory back to the trainer; nothing happens on CPU. Needs `EngineSpec.sleeps`."""
        self._call("sleep").result()

    def wake(self, *parts: str) -> None:
        """Take it again: "weights" before a push, "kv_cache" after it."""
        self._call("wake", *parts).result()

    def export_slots(self, nbytes: int) -> list[ExportedSlots]:
        """Memory of every worker's GPU that trainer ranks of the same host can write to. # untested on GPU"""
        return self._call("export_slots", nbytes).result()

    def update_weights(self, update: Sequence[Mapping[str, Any]], version: int) -> list[dict[str, Any]]:
        """Load the pushed weights; tokens sampled from now on carry `version`. Returns one report per rank.

        A failed update leaves an engine that generates nothing until one succeeds.
        """
        report = self.update_weights_soon(update, version).result()
        self.weight_version = version  # not left to the answering thread, which may be a moment behind
        return report

    def update_weights_soon(self, update: Sequence[Mapping[str, Any]], version: int) -> "Future[list[dict[str, Any]]]":
        """Like `update_weights`, without waiting: where ranks send while the engine receives."""

        def note(done: "Future[Any]") -> None:
            if done.exception() is None:
                self.weight_version = version

        future = self._call("update_weights", list(update), version)
        future.add_done_callback(note)
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDied(str(self._death))
