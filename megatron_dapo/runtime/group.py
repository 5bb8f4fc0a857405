"""A worker group is how the driver speaks to all ranks at once; under torchrun rank 0 drives and the others serve."""

from collections.abc import Sequence
from datetime import timedelta
from operator import methodcaller
from typing import Any, Protocol

import torch.distributed as dist

_STOP = "__stop__"
_FOREVER = timedelta(
    days=7
)  # a rank may wait through any generation; a dead peer closes its socket and is seen at once


class WorkerGroup(Protocol):
    """The same few words under torchrun and under Ray."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def call(self, method: str, shares: Sequence[Any] | None = None, **common: Any) -> list[Any]:
        """Runs `worker.method(share, **common)` on every rank at the same time and returns the results by rank.

        `shares` holds one argument per rank; without it the method gets only `common`.
        """
        ...

    def close(self) -> None:
        """Ends the serving ranks."""
        ...


class LocalWorkerGroup:
    """One rank: the driver's own worker, no communication."""

    size = 1

    def __init__(self, worker: Any):
        self._worker = worker

    def call(self, method: str, shares: Sequence[Any] | None = None, **common: Any) -> list[Any]:
        return [_invoke(self._worker, method, shares is not None, shares[0] if shares else None, common)]

    def close(self) -> None:
        """Nothing to end."""


class TorchrunWorkerGroup:
    """The driver's side on rank 0: scatter the call, do one's own part, gather the results."""

    def __init__(self, worker: Any, control: dist.ProcessGroup):
        self._worker, self._control = worker, control
        self.size = dist.get_world_size()

    def call(self, method: str, shares: Sequence[Any] | None = None, **common: Any) -> list[Any]:
        has_share = shares is not None
        dealt = [None] * self.size if shares is None else list(shares)
        if len(dealt) != self.size:
            raise ValueError(f"{method}: {len(dealt)} shares for {self.size} ranks")
        messages = [(method, has_share, share, common) for share in dealt]
        mine = _scatter(messages, self._control)
        result = _invoke(self._worker, *mine)
        return _gather(result, self._control)

    def close(self) -> None:
        _scatter([(_STOP, False, None, {})] * self.size, self._control)


def control_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, apart from those that train, whose waiting never times out."""
    return dist.new_group(backend="gloo", timeout=_FOREVER)


def serve(worker: Any, control: dist.ProcessGroup) -> None:
    """The other ranks' loop: wait for a call, run it, return the result, until the driver closes the group."""
    while True:
        method, has_share, share, common = _scatter(None, control)
        if method == _STOP:
            return
        _gather(_invoke(worker, method, has_share, share, common), control)


def _invoke(worker: Any, method: str, has_share: bool, share: Any, common: dict[str, Any]) -> Any:
    return methodcaller(method, *([share] if has_share else []), **common)(worker)


def _scatter(messages: list[Any] | None, control: dist.ProcessGroup) -> Any:
    received: list[Any] = [None]
    dist.scatter_object_list(received, messages, src=0, group=control)
    return received[0]


def _gather(result: Any, control: dist.ProcessGroup) -> list[Any]:
    driver = dist.get_rank() == 0
    results: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(result, results if driver else None, dst=0, group=control)
    return results
