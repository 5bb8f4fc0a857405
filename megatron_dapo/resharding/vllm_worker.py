"""The vLLM worker's side of a push: a weight-transfer backend that copies slices into the live model.

Our own engines name the extension below, which brings the backend into every worker process even where the package,
and with it the entry point of `vllm_plugin`, is not installed.
"""

import mmap
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from megatron_dapo.resharding.checksum import checksum
from megatron_dapo.resharding.layouts import ITEM_SIZE, Segment, segment, storage_box
from megatron_dapo.resharding.transport_shm import storage_view
from megatron_dapo.resharding.vllm_install import check_installable, finish, install
from megatron_dapo.resharding.vllm_layout import VllmLayout, model_layout
from megatron_dapo.resharding.vllm_plugin import register


class ChecksumError(RuntimeError):
    """What arrived is not what was sent."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    pass


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where this worker's segment is, and the checksum of each slice of its layout (empty: do not check)."""

    handle: str
    nbytes: int
    digest: str
    sums: list[int] = field(default_factory=list)


class SliceTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Takes exactly the boxes this worker stores, from a shared segment laid out as its own storages."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        check_installable(self.model)
        self.layout: VllmLayout = model_layout(self.model, self.model_config.model)
        self.segment: Segment = segment(self.layout.slices, self.layout.dtypes)
        self.mapped: tuple[tuple[int, int], Tensor] | None = None
        self.received = 0

    def start_weight_update(self) -> None:
        self.received = 0

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.digest != self.segment.digest:
            raise RuntimeError(
                f"the pushed weights are laid out for another model (layout {update_info.digest}, this worker has "
                f"{self.segment.digest}): the engine was started from a different config than the layouts came from"
            )
        memory = self._memory(update_info)
        verify(self.layout, self.segment, memory, update_info.sums)
        for param, storage in self.segment.storages.items():
            install(self.model, param, storage_view(memory, storage))
        self.received += sum(p.numel * ITEM_SIZE[self.layout.dtypes[p.param]] for p in self.layout.slices)

    def finish_weight_update(self) -> None:
        if self.received == 0:
            raise RuntimeError("the weight update ended before any weights came")
        finish(self.model, self.model_config.dtype)

    def shutdown(self) -> None:
        self.mapped = None

    def _memory(self, update_info: UpdateInfo) -> Tensor:
        """The segment, mapped once. A file is known by its inode: handles are reused when a trainer starts anew."""
        fd = os.open(update_info.handle, os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(fd)
        file = (status.st_dev, status.st_ino)
        if self.mapped is None or self.mapped[0] != file:
            self.mapped = (file, torch.frombuffer(mmap.mmap(fd, update_info.nbytes), dtype=torch.uint8))
        os.close(fd)
        return self.mapped[1]


def verify(layout: VllmLayout, place: Segment, memory: Tensor, sums: list[int]) -> None:
    """Compare the checksum of every slice that has one. Raises ChecksumError naming the tensor."""
    for piece, expected in zip(layout.slices, sums, strict=bool(sums)):
        offset, shape = storage_box(piece)
        index = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
        found = checksum(storage_view(memory, place.storages[piece.param])[index])
        if found != expected:
            where = f"{piece.tensor}{list(piece.offset)}+{list(piece.shape)}"
            raise ChecksumError(f"{where} arrived damaged: its checksum is {found:x}, what was sent has {expected:x}")


class WorkerExtension:
    """Mixed into vLLM's worker: what a rollout engine asks of it besides generating."""

    model_runner: Any
    weight_transfer_engine: SliceTransferEngine

    def megatron_dapo_layout(self) -> tuple[Any, dict[str, str], tuple[str, ...]]:
        layout = self.weight_transfer_engine.layout
        return layout.slices, dict(layout.dtypes), layout.full

    def megatron_dapo_report(self) -> dict[str, Any]:
        return {"bytes_received": self.weight_transfer_engine.received}


register()
