"""What leaves the device while another role uses it: storages are copied to the host and freed, and come back in place.

Tensors, views and optimizer references stay what they are, only without memory in between. On a host without a device
the same happens between two places in memory: no use, but the same code, except that memory which NumPy has looked into
(a push does) cannot be freed and stays. # untested on GPU
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dapo.config.training import OffloadConfig
from megatron_dapo.engine.engine import MegatronEngine
from megatron_dapo.parallel.capabilities import capabilities


@dataclass
class _Away:
    """A storage without memory, and what it held (None: nothing worth keeping)."""

    storage: torch.UntypedStorage
    size: int
    copy: Tensor | None


class Stash:
    """Some tensors' storages, as `find` names them at the time they leave. `keep=False`: they come back as zeros."""

    def __init__(self, find: Callable[[], Iterable[Tensor]], keep: bool = True):
        self._find, self._keep = find, keep
        self._away: list[_Away] = []

    def leave(self) -> None:
        """Copies to the host and frees the device. Twice is once."""
        for storage in storages_of(self._find()):
            size = storage.nbytes()
            self._away.append(_Away(storage, size, _to_host(storage) if self._keep else None))
        if capabilities().cuda:
            torch.cuda.synchronize()  # the copies are complete
        for one in self._away:
            one.storage.resize_(0)

    def come_back(self) -> None:
        """The same storages with the same content."""
        for one in self._away:
            one.storage.resize_(one.size)
            content = _bytes(one.storage)
            content.zero_() if one.copy is None else content.copy_(one.copy, non_blocking=True)
        self._away = []


class Offload:
    """When the parts of one engine are on the device: only while they are used, as far as `which` says."""

    def __init__(self, engine: MegatronEngine, which: OffloadConfig):
        optimizer = Stash(lambda: optimizer_tensors(engine)) if which.optimizer else None
        gradients = Stash(lambda: gradient_tensors(engine), keep=False) if which.grad else None
        parameters = Stash(lambda: parameter_tensors(engine)) if which.param else None
        # In this order: under float32 the optimizer's main weights are the parameters themselves and stay with them.
        self._training = [stash for stash in (optimizer, gradients) if stash is not None]
        self._parameters = [parameters] if parameters is not None else []
        self._leave(self._training + self._parameters)

    @contextmanager
    def present(self, training: bool = False) -> Iterator[None]:
        """Parameters (and with `training` gradients and optimizer state) on the device for as long as this lasts."""
        wanted = (self._training if training else []) + self._parameters
        for stash in reversed(wanted):
            stash.come_back()
        try:
            yield
        finally:
            self._leave(wanted)

    @staticmethod
    def _leave(stashes: list[Stash]) -> None:
        for stash in stashes:
            stash.leave()
        if stashes and capabilities().cuda:
            torch.cuda.empty_cache()  # for whoever shares the device


def parameter_tensors(engine: MegatronEngine) -> Iterator[Tensor]:
    """Weights and buffers of all chunks."""
    for chunk in engine.chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()


def gradient_tensors(engine: MegatronEngine) -> Iterator[Tensor]:
    """The flat buffers that Megatron accumulates gradients in; zero at the start of every optimizer step."""
    for chunk in engine.trainable.chunks if engine.training is not None else []:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield buffer.grad_data


def optimizer_tensors(engine: MegatronEngine) -> Iterator[Tensor]:
    """Adam's moments and the float32 main weights, where they are tensors of their own."""
    if engine.training is None:
        return
    model = {storage.data_ptr() for storage in storages_of(parameter_tensors(engine))}
    for part in engine.training.optimizer.chained_optimizers:
        main = [weight for group in part.optimizer.param_groups for weight in group["params"]]
        moments = [value for state in part.optimizer.state.values() for value in state.values()]
        for tensor in [*main, *moments]:
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.untyped_storage().data_ptr() not in model:
                yield tensor


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once, without those that hold nothing or cannot be freed."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes() and storage.resizable()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=capabilities().cuda)
    return host.copy_(_bytes(storage), non_blocking=True)
