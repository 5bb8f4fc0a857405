"""The data plane between rollout and training: prompts and trajectories as rows of the TransferQueue package.

A row has a key, tags (small facts that the controller lists without touching data) and fields (1-D tensors each).

    prompt        key `uid`            tags is_prompt, status, global_steps, order, values
    trajectory    key `uid_sample`     tags is_prompt, uid, min_version, max_version, prompt_length, response_length

Every stage writes only its own fields: rollout the tokens, reward the scores. Rows are small copies, never views of a
batch, so a snapshot is as large as what is in it. A storage unit that is gone is an error within `DEADLINE` seconds.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from megatron_dapo.errors import UserError

T = TypeVar("T")
Row = dict[str, Tensor]
Tags = dict[str, Any]

DEADLINE = 25.0  # seconds; the package's own timeouts below end a call on a dead storage unit after about 20
ENVIRONMENT = {  # of everybody who talks to the queue, and of its own processes
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "7",
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "2",
    "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT": "4",
    "TQ_LOGGING_LEVEL": "CRITICAL",
}


class QueueError(RuntimeError):
    """The queue lost rows or does not answer. Nothing in it can be trusted; restore a checkpoint."""


@dataclass(frozen=True)
class Queue:
    """One partition of a running TransferQueue. Thread-safe."""

    partition: str
    _threads: ThreadPoolExecutor

    @classmethod
    def open(cls, storage_units: int = 1, partition: str = "train") -> "Queue":
        """Start controller and storage units in this process's Ray, which has room for one queue.

        Raises UserError where another run's queue stands there.
        """
        set_environment()
        import transfer_queue
        from omegaconf import OmegaConf

        _wait_until_free()
        units = {"backend": {"SimpleStorage": {"num_data_storage_units": storage_units}}}
        transfer_queue.init(OmegaConf.create(units, flags={"allow_objects": True}))
        return cls(partition, ThreadPoolExecutor(8, thread_name_prefix="queue"))

    def put(self, rows: Mapping[str, Row], tags: Mapping[str, Tags] | None = None) -> None:
        """Write these fields of these rows, all with the same names, and update their tags."""
        if rows:
            fields = TensorDict(_columns(list(rows.values())), batch_size=len(rows))
            marks = None if tags is None else [tags[key] for key in rows]
            self._call("kv_batch_put", keys=list(rows), partition_id=self.partition, fields=fields, tags=marks)

    def mark(self, tags: Mapping[str, Tags]) -> None:
        """Update tags only."""
        if tags:
            self._call("kv_batch_put", keys=list(tags), partition_id=self.partition, tags=list(tags.values()))

    def get(self, keys: Sequence[str], names: Sequence[str] | None = None) -> list[Row]:
        """These fields (None: all) of these rows, as copies."""
        if not keys:
            return []
        wanted = None if names is None else list(names)
        fields = self._call("kv_batch_get", keys=list(keys), partition_id=self.partition, select_fields=wanted)
        columns = {name: [cell.clone() for cell in column.unbind()] for name, column in fields.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(len(keys))]

    def tags(self) -> dict[str, Tags]:
        """The tags of every row, in the order of their first put."""
        return self._call("kv_list", partition_id=self.partition).get(self.partition, {})

    def clear(self, keys: Iterable[str]) -> None:
        """Remove rows that are there."""
        if gone := list(keys):
            self._call("kv_clear", keys=gone, partition_id=self.partition)

    def snapshot(self, path: Path, choose: Callable[[dict[str, Tags]], Iterable[str]]) -> None:
        """The rows that `choose` names of those there are now, and their tags, to a file."""
        tags = self.tags()
        by_kind: dict[bool, list[str]] = defaultdict(list)
        for key in choose(tags):
            by_kind[tags[key]["is_prompt"]].append(key)
        rows = {key: row for kind in by_kind.values() for key, row in zip(kind, self.get(kind), strict=True)}
        torch.save({key: (tags[key], row) for key, row in rows.items()}, path)

    def restore(self, path: Path) -> None:
        """The inverse of `snapshot`, into an empty partition."""
        saved: dict[str, tuple[Tags, Row]] = torch.load(path, weights_only=False)
        by_fields: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for key, (_, row) in saved.items():
            by_fields[tuple(row)].append(key)
        for keys in by_fields.values():
            self.put({key: saved[key][1] for key in keys}, {key: saved[key][0] for key in keys})

    def close(self) -> None:
        """End the controller and the storage units."""
        import transfer_queue

        self._threads.shutdown(wait=False, cancel_futures=True)
        transfer_queue.close()

    def _call(self, name: str, **arguments: Any) -> Any:
        import transfer_queue
        from transfer_queue.storage.managers.simple_storage_manager import StorageUnitTimeout

        call: Callable[..., Any] = transfer_queue.__dict__[name]
        try:
            return self._threads.submit(call, **arguments).result(DEADLINE)
        except (StorageUnitTimeout, Late) as error:
            reason = str(error) or f"no answer in {DEADLINE:.0f} s"
            raise QueueError(f"TransferQueue {name}: {reason}. A storage unit or the controller is gone") from error


def set_environment() -> None:
    """For this process and those that it starts: a Ray of its own, and the queue's processes in that."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _wait_until_free() -> None:
    """The package would join a queue that it finds, and mix two runs. That of a run that just died goes by itself."""
    import ray

    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            ray.get_actor("TransferQueueController", namespace="transfer_queue")
        except ValueError:
            return
        if time.monotonic() > deadline:
            raise UserError(
                "this Ray cluster already has a TransferQueue, of another run in an asynchronous mode: wait for its "
                "end, or give this run a cluster of its own (unset RAY_ADDRESS)"
            )
        time.sleep(0.5)


def _columns(rows: Sequence[Row]) -> dict[str, Tensor]:
    """One ragged column per field."""
    return {name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged) for name in rows[0]}
