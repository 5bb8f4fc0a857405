"""A rollout engine on any node of a Ray cluster, used as if it were here: the same methods, futures and errors."""

import queue
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from megatron_dapo.rollout.client import EngineClient, EngineDied
from megatron_dapo.rollout.engine import RolloutEngine
from megatron_dapo.rollout.requests import Generation
from megatron_dapo.rollout.spec import EngineSpec
from megatron_dapo.rollout.wire import pack_generations, unpack_generations, unpack_requests
from megatron_dapo.runtime.ray import Slot, cause_of, in_one_line

LINGER_SECONDS = 0.005  # finished samples wait so long for others, to travel together
PATIENCE_SECONDS = 2.0  # a collector that has nothing to report says so this often
CLOSE_SECONDS = 15.0
COMMANDS, RESULTS = "commands", "results"  # two threads of the actor, each in order of arrival


class EngineActor:
    """The far side: the engine's process is a child of this actor, on its node."""

    def __init__(self, spec: EngineSpec) -> None:
        gpus = tuple(int(number) for number in ray.get_gpu_ids())  # untested on GPU
        self.engine = RolloutEngine.start(replace(spec, gpus=gpus) if gpus else spec)
        self._finished: queue.SimpleQueue[tuple[str, Future[Generation]]] = queue.SimpleQueue()

    @ray.method(concurrency_group=COMMANDS)
    def command(self, name: str, arguments: tuple[Any, ...]) -> Any:
        return methodcaller(name, *arguments)(self.engine)

    @ray.method(concurrency_group=COMMANDS)
    def pid(self) -> int:
        return self.engine.pid

    @ray.method(concurrency_group=COMMANDS)
    def submit(self, packed: dict[str, Any]) -> None:
        requests = unpack_requests(packed)
        for request, future in zip(requests, self.engine.submit(requests), strict=True):
            future.add_done_callback(partial(self._done, request.request_id))

    def _done(self, request_id: str, future: "Future[Generation]") -> None:
        self._finished.put((request_id, future))

    @ray.method(concurrency_group=RESULTS)
    def collect(self) -> tuple[dict[str, Any], dict[str, Exception]]:
        """What has ended since the last call: packed generations, and the errors of others. Raises EngineDied."""
        ended: list[tuple[str, Future[Generation]]] = []
        wait = PATIENCE_SECONDS
        while True:
            try:
                ended.append(self._finished.get(timeout=wait))
            except queue.Empty:
                break
            wait = LINGER_SECONDS
        if not ended and not self.engine.alive:
            self.engine.layouts()  # raises EngineDied with its reason
        errors = {request_id: error for request_id, future in ended if (error := _error(future)) is not None}
        return pack_generations([future.result() for name, future in ended if name not in errors]), errors

    @ray.method(concurrency_group=COMMANDS)
    def close(self) -> None:
        self.engine.close()


def _error(future: "Future[Any]") -> Exception | None:
    error = future.exception()
    return error if isinstance(error, Exception) or error is None else RuntimeError(str(error))


class RemoteEngine(EngineClient):
    """One engine behind an actor, from the driver; a collector thread hands out what has finished."""

    def __init__(self, spec: EngineSpec, slot: Slot) -> None:
        """Starts the actor and the engine in it and returns at once; `wait_ready` says when it can generate."""
        super().__init__(spec)
        self.slot = slot
        remote = ray.remote(concurrency_groups={COMMANDS: 1, RESULTS: 1})(EngineActor)
        self._actor = remote.options(**slot.options()).remote(spec)
        threading.Thread(target=self._collect, name=f"{spec.name}-collector", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._death is None and not self._closing

    def restart(self) -> "RemoteEngine":
        """A new engine for a dead one: in its slot, which Ray moves to another node if its own is gone."""
        self.close()
        return RemoteEngine(self.spec, self.slot)

    def wait_ready(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until vLLM has loaded. Raises EngineDied if it could not start, TimeoutError after `timeout` seconds."""
        return self._call("wait_ready", timeout).result()

    @property
    def pid(self) -> int:
        """The engine's process on its node."""
        return self._ask(self._actor.pid.remote()).result()

    def layouts(self) -> Any:
        return self._call("layouts").result()

    def dtypes(self) -> dict[str, str]:
        return self._call("dtypes").result()

    def full_tensors(self) -> tuple[str, ...]:
        return self._call("full_tensors").result()

    def target(self) -> Any:
        """Where and how this engine takes weights, for the bridge."""
        return self._call("target").result()

    def close(self) -> None:
        """End the engine and its actor. May be called twice."""
        if self._closing:
            return
        self._closing = True
        closing = self._actor.close.remote()
        ray.wait([closing], timeout=CLOSE_SECONDS)
        ray.kill(self._actor)
        self._bury(EngineDied(f"rollout engine {self.spec.name} was closed"))

    def _call(self, command: str, *arguments: Any) -> "Future[Any]":
        with self._state:
            self._raise_if_dead()
        return self._ask(self._actor.command.remote(command, arguments))

    def _send(self, packed: dict[str, Any]) -> "Future[Any]":
        return self._ask(self._actor.submit.remote(packed))

    def _ask(self, answer: Any) -> "Future[Any]":
        """A future of an actor's answer, with our errors instead of Ray's."""
        future: Future[Any] = Future()

        def done(finished: "Future[Any]") -> None:
            error = finished.exception()
            if error is None:
                future.set_result(finished.result())
            else:
                future.set_exception(self._translate(error))

        answer.future().add_done_callback(done)
        return future

    def _translate(self, error: BaseException) -> BaseException:
        if isinstance(error, RayActorError):
            return self._death or EngineDied(f"rollout engine {self.spec.name} died: {in_one_line(error)}")
        return cause_of(error) if isinstance(error, RayError) else error

    def _collect(self) -> None:
        """The results' reader: hands out what has finished until the engine is dead or closed."""
        while not self._closing:
            try:
                packed, errors = ray.get(self._actor.collect.remote())
            except Exception as error:  # whatever it is, nothing more will come from there
                reason = self._translate(error)
                self._bury(reason if isinstance(reason, EngineDied) else EngineDied(f"{self.spec.name}: {reason}"))
                return
            for generation in unpack_generations(packed):
                self._end(generation.request_id, None, generation)
            if died := next((error for error in errors.values() if isinstance(error, EngineDied)), None):
                self._bury(died)  # first: whoever is told of the death finds it dead
                return
            for request_id, failure in errors.items():
                self._end(request_id, failure)

    def _end(self, request_id: str, error: BaseException | None, generation: Generation | None = None) -> None:
        with self._state:
            future = self._generations.pop(request_id, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        elif generation is not None:
            future.set_result(generation)

    def _bury(self, death: EngineDied) -> None:
        with self._state:
            if self._death is None:
                self._death = death
            waiting, reason = list(self._generations), self._death
        for request_id in waiting:
            self._end(request_id, reason)
