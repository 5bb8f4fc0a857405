"""What Megatron-core sees as `torch.cuda` on a host without CUDA: one device, one stream, the CPU's random state.

Only the names that would fail on a CPU build of torch are defined; everything else is torch.cuda's own
(`is_available()` is False there already).
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

_CPU = torch.device("cpu")

FloatTensor = torch.FloatTensor
HalfTensor = torch.HalfTensor
BFloat16Tensor = torch.BFloat16Tensor
IntTensor = torch.IntTensor
LongTensor = torch.LongTensor


class Stream:
    """Work on the host is ordered already, so waiting, recording and synchronising are nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class Event:
    """A point in the host's only stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


class CUDAGraph:
    """Never instantiated on a host; Megatron only tests for the type."""


_STREAM = Stream()


def current_device() -> torch.device:
    """The host is the device. Megatron passes the result on as `device=`."""
    return _CPU


def set_device(device: Any) -> None:
    pass


def device(device: Any = None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def current_stream(device: Any = None) -> Stream:
    return _STREAM


default_stream = current_stream


def stream(stream: Stream | None = None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def set_stream(stream: Stream) -> None:
    pass


def synchronize(device: Any = None) -> None:
    pass


def empty_cache() -> None:
    pass


def ipc_collect() -> None:
    pass


def is_current_stream_capturing() -> bool:
    return False


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The "device" generator is torch's CPU generator: dropout and initialisation on a host draw from it."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


manual_seed_all = manual_seed
default_generators = {_CPU: torch.default_generator, None: torch.default_generator}


def memory_allocated(device: Any = None) -> int:
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


def memory_stats(device: Any = None) -> dict[str, int]:
    return {}


def reset_peak_memory_stats(device: Any = None) -> None:
    pass


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return (0, 0)


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (0, 0)


def get_device_name(device: Any = None) -> str:
    return "cpu"


def _lazy_init() -> None:
    pass


def _lazy_call(callback: Any, **kwargs: Any) -> None:
    callback()


nvtx = SimpleNamespace(
    range_push=lambda message: 0,
    range_pop=lambda: 0,
    mark=lambda message: 0,
    range=lambda message, *args, **kwargs: contextlib.nullcontext(),
)
random = SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state)


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)
