"""The vLLM worker's side of a push: a weight-transfer backend that copies slices into the live model.

Our own engines name the extension below, which brings the backend into every worker process even where the package,
and with it the entry point of `vllm_plugin`, is not installed.
"""

import os
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from megatron_dapo.resharding.layouts import Segment, segment
from megatron_dapo.resharding.transport_files import FileReceiver
from megatron_dapo.resharding.transport_ipc import ExportedSlots, export_slots
from megatron_dapo.resharding.transport_peers import PeerReceiver
from megatron_dapo.resharding.transport_ring import RingReceiver
from megatron_dapo.resharding.transport_shm import SharedMemoryReceiver
from megatron_dapo.resharding.vllm_install import check_installable, finish, install
from megatron_dapo.resharding.vllm_layout import VllmLayout, model_layout
from megatron_dapo.resharding.vllm_plugin import register

Receiver = SharedMemoryReceiver | RingReceiver | PeerReceiver | FileReceiver
RECEIVERS: dict[str, type[Receiver]] = {
    "shared_memory": SharedMemoryReceiver,
    "ring": RingReceiver,
    "peers": PeerReceiver,
    "files": FileReceiver,
}


@dataclass
class InitInfo(WeightTransferInitInfo):
    pass


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """How this worker gets its share of a push: a transport, what it must know, and for which layout it is meant."""

    transport: str
    digest: str
    details: dict[str, Any] = field(default_factory=dict)


class SliceTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Takes exactly the boxes this worker stores and puts them into the live model, storage by storage."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        check_installable(self.model)
        self.layout: VllmLayout = model_layout(self.model, self.model_config.model)
        self.segment: Segment = segment(self.layout.slices, self.layout.dtypes)
        self.receiver: Receiver | None = None
        self.received = 0

    def start_weight_update(self) -> None:
        self.received = 0

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.digest != self.segment.digest:
            raise RuntimeError(
                f"the pushed weights are laid out for another model (layout {update_info.digest}, this worker has "
                f"{self.segment.digest}): the engine was started from a different config than the layouts came from"
            )
        kind = RECEIVERS[update_info.transport]
        if not isinstance(self.receiver, kind) or not self.receiver.serves(update_info.details):
            self.receiver = None  # lets go of the old one's memory or connections first
            self.receiver = kind(self.layout.slices, self.segment, update_info.details)
        try:
            for param, storage in self.receiver.storages():
                install(self.model, param, storage)
        except Exception:
            self.receiver = None  # whatever state it is in, the next push starts afresh
            raise
        self.received = self.receiver.received

    def finish_weight_update(self) -> None:
        if self.received == 0:
            raise RuntimeError("the weight update ended before any weights came")
        finish(self.model, self.model_config.dtype)

    def shutdown(self) -> None:
        self.receiver = None


class WorkerExtension:
    """Mixed into vLLM's worker: what a rollout engine asks of it besides generating."""

    model_runner: Any
    weight_transfer_engine: SliceTransferEngine

    def megatron_dapo_layout(self) -> tuple[Any, dict[str, str], tuple[str, ...]]:
        layout = self.weight_transfer_engine.layout
        return layout.slices, dict(layout.dtypes), layout.full

    def megatron_dapo_shared_memory(self) -> str:
        """What the names of vLLM's shared memory between CPU workers begin with; empty if it has none."""
        return os.environ.get("VLLM_DIST_IDENT", "")

    def megatron_dapo_export_slots(self, nbytes: int) -> ExportedSlots:
        return export_slots(nbytes, self.weight_transfer_engine.device)

    def megatron_dapo_report(self) -> dict[str, Any]:
        return {"bytes_received": self.weight_transfer_engine.received}


register()
