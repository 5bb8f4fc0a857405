"""Memory that two processes share, and the tensors that lie in it."""

import contextlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron_dapo.resharding.layouts import Storage


class SharedFile:
    """A file mapped into this process, as bytes. Created if it is not there; every rank creates the same."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self.fd).st_size != nbytes:
            os.ftruncate(self.fd, nbytes)
        self.bytes = map_bytes(self.fd, nbytes)

    @property
    def handle(self) -> str:
        """Opens this very file, also when it has no name any more, for as long as this process has it open."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        os.close(self.fd)
        unlink([self.path])


def host_identity() -> str:
    """Equal in two processes just when they share memory by name and find each other under /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/dev/shm').st_dev}-{os.stat('/proc/self/ns/pid').st_ino}"


def map_bytes(fd: int, nbytes: int) -> Tensor:
    """The first bytes of an open file; writing to the tensor writes to the file."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


def unlink(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def storage_view(memory: Tensor, storage: Storage) -> Tensor:
    """The storage as a tensor over the bytes of its segment."""
    part = memory[storage.offset : storage.offset + storage.nbytes]
    return part.view(torch_dtype(storage.dtype)).view(storage.shape)


def torch_dtype(name: str) -> torch.dtype:
    """`bfloat16` as torch's dtype."""
    return getattr(torch, name)
