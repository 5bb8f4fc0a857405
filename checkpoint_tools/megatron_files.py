"""Megatron's distributed checkpoint as a set of boxes: where each HF tensor lies in it, read and written in pieces.

The place of every parameter (its key, its offset in the global tensor) is asked from Megatron itself, through the
`sharded_state_dict` of a model whose memory is allocated but never touched.
"""

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_dapo.config.model import ModelConfig, ParallelConfig
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.build import build_model
from megatron_dapo.models.hf_files import HFWeights, WeightsError
from megatron_dapo.models.megatron_config import transformer_config
from megatron_dapo.models.slices import Slice
from megatron_dapo.models.storage import box, storages
from megatron_dapo.models.tables import hf_shapes, megatron_slices, mtp_copies
from megatron_dapo.parallel.capabilities import capabilities
from megatron_dapo.parallel.groups import init_distributed
from megatron_dapo.parallel.topology import Topology

PART_BYTES = 4 << 30
Shape = tuple[int, ...]
Progress = Callable[[str, int, int], None]  # what was just done, how many of how many


@dataclass(frozen=True)
class Place:
    """The box of one whole parameter that is one entry of the checkpoint: `offset` in the global tensor `key`."""

    key: str
    size: Shape  # of the global tensor
    offset: Shape
    param: str
    param_offset: Shape
    shape: Shape  # of the box inside the parameter

    @property
    def extra(self) -> int:
        """Leading dimensions of extent one that the global tensor has and the parameter has not (layers, experts)."""
        return len(self.size) - len(self.shape)


@dataclass(frozen=True)
class Plan:
    """Everything that a checkpoint of this network contains, and the table of its HF tensors."""

    places: tuple[Place, ...]
    objects: tuple[ShardedObject, ...]
    slices: dict[str, tuple[Slice, ...]]  # by parameter
    shapes: dict[str, Shape]  # of the HF tensors
    copies: dict[str, str]  # HF tensors that repeat another one, which alone is in a Megatron checkpoint

    def of_param(self) -> dict[str, list[Place]]:
        """The places of each parameter."""
        found: dict[str, list[Place]] = {}
        for place in self.places:
            found.setdefault(place.param, []).append(place)
        return found


def make_plan(arch: Architecture, value_head: bool = False) -> Plan:
    """Where everything lies. Needs no weights, and memory only for the modules. Starts a world of one if there is none.

    In a larger world every rank makes the same plan and may take a share of the work.
    """
    ensure_world()
    config = transformer_config(arch, ModelConfig(dtype="float32"), ParallelConfig())
    chunks = build_model(arch, config, value_head=value_head)
    names = {storage.untyped_storage().data_ptr(): name for name, storage in storages(chunks).items()}
    state = sharded_state(chunks[0])
    apply_factories(state)
    entries = list(nested_values(state))
    slices: dict[str, list[Slice]] = {}
    for piece in megatron_slices(arch, Topology(), 0, te=capabilities().transformer_engine, value_head=value_head):
        slices.setdefault(piece.param, []).append(piece)
    shapes = hf_shapes(arch, value_head)
    copies = {} if value_head else mtp_copies(arch)
    return Plan(
        places=tuple(_place(entry, names) for entry in entries if isinstance(entry, ShardedTensor)),
        objects=tuple(entry for entry in entries if isinstance(entry, ShardedObject)),
        slices={name: tuple(pieces) for name, pieces in slices.items()},
        shapes=shapes | {copy: shapes[of] for copy, of in copies.items()},
        copies=copies,
    )


def hf_architecture(path: Path, weights: HFWeights) -> Architecture:
    """The network of config.json, and as many layers that predict further tokens as there are weights of."""
    arch = Architecture.from_dir(path)
    has = (f"model.layers.{arch.layers + i}.eh_proj.weight" in weights for i in count())
    return replace(arch, mtp_layers=sum(takewhile(bool, has)))


def megatron_architecture(path: Path, checkpoint: Path) -> Architecture:
    """As `hf_architecture`, by the tensors of a Megatron checkpoint. Raises WeightsError for an incomplete one."""
    keys = read_metadata(checkpoint).state_dict_metadata
    has = (any(key.endswith(f"mtp.layers.{i}.eh_proj.weight") for key in keys) for i in count())
    return replace(Architecture.from_dir(path), mtp_layers=sum(takewhile(bool, has)))


def read_metadata(checkpoint: Path) -> Metadata:
    """What is in a distributed checkpoint. Raises WeightsError for a directory that is not a complete one."""
    if not (checkpoint / "metadata.json").is_file():
        raise WeightsError(f"{checkpoint} is not a complete Megatron checkpoint: it has no metadata.json")
    return FileSystemReader(checkpoint).read_metadata()


def ensure_world() -> None:
    """Megatron's groups without any model parallelism, over the ranks that torchrun started, or over this process."""
    if not mpu.model_parallel_is_initialized():
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        init_distributed(Topology(world=ranks), seed=0)


def sharded_state(model: MegatronModule) -> dict[str, Any]:
    """Megatron's own description of where each parameter lies in a distributed checkpoint."""
    return model.sharded_state_dict(metadata={"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)})


def _place(entry: ShardedTensor, names: dict[int, str]) -> Place:
    data = entry.data
    first = data.storage_offset() // data.stride(0) if data.dim() > 1 else data.storage_offset()
    return Place(
        key=entry.key,
        size=tuple(entry.global_shape),
        offset=tuple(entry.global_offset),
        param=names[data.untyped_storage().data_ptr()],
        param_offset=(first,) + (0,) * (data.dim() - 1),
        shape=tuple(data.shape),
    )


def overlap(a_offset: Shape, a_shape: Shape, b_offset: Shape, b_shape: Shape) -> tuple[Shape, Shape] | None:
    """The box that two boxes share, as (offset, shape); None when they do not touch."""
    start = tuple(max(a, b) for a, b in zip(a_offset, b_offset, strict=True))
    ends = zip(a_offset, a_shape, b_offset, b_shape, strict=True)
    shape = tuple(min(a + n, b + m) - s for (a, n, b, m), s in zip(ends, start, strict=True))
    return (start, shape) if all(n > 0 for n in shape) else None


def _minus(a: Shape, b: Shape) -> Shape:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _plus(a: Shape, b: Shape) -> Shape:
    return tuple(x + y for x, y in zip(a, b, strict=True))


class MegatronWeights:
    """Reads HF tensors out of a distributed checkpoint of any layout. Has the interface of `HFWeights`."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = Path(path)
        self.metadata = read_metadata(self.path)
        self._reader = FileSystemReader(self.path)
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self._plan, self._by_param = plan, plan.of_param()
        self._pieces: dict[str, list[Slice]] = {name: [] for name in plan.shapes if name not in plan.copies}
        for pieces in plan.slices.values():
            for piece in pieces:
                self._pieces[piece.tensor].append(piece)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.shapes)

    def shape(self, name: str) -> Shape:
        """Shape of an HF tensor."""
        return self._plan.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which the checkpoint keeps it."""
        place = self._by_param[self._pieces[self._plan.copies.get(name, name)][0].param][0]
        return self._stored(place).properties.dtype

    def read_many(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole HF tensors, in one pass over the files."""
        stored = {name: self._plan.copies.get(name, name) for name in names}
        tensors = {
            name: torch.empty(self._plan.shapes[name], dtype=self.dtype(name)) for name in sorted(set(stored.values()))
        }
        targets: dict[tuple[str, Shape], Tensor] = {}
        items: list[ReadItem] = []
        for name, tensor in tensors.items():
            for piece in self._pieces[name]:
                for place in self._by_param[piece.param]:
                    items += self._request(piece, place, tensor, targets)
        try:
            self._reader.read_data(self._reader.prepare_local_plan(LoadPlan(items)), _Targets(targets)).wait()
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise WeightsError(
                f"{self.path}: a file of this checkpoint is missing or cut off, found when reading {names[0]} ({error})"
            ) from error
        return {name: tensors[original] for name, original in stored.items()}

    def _request(
        self, piece: Slice, place: Place, tensor: Tensor, targets: dict[tuple[str, Shape], Tensor]
    ) -> list[ReadItem]:
        shared = overlap(piece.param_offset, piece.shape, place.param_offset, place.shape)
        if shared is None:
            return []
        start, shape = shared
        inside = _plus(piece.offset, _minus(start, piece.param_offset))
        local = (0,) * place.extra + _minus(start, place.param_offset)
        offset, size = _plus(place.offset, local), (1,) * place.extra + shape
        targets[place.key, offset] = (
            box(tensor, inside, shape).view(size) if place.extra else box(tensor, inside, shape)
        )
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
        return create_read_items_for_chunk_list(place.key, self._stored(place), [chunk])

    def _stored(self, place: Place) -> TensorStorageMetadata:
        stored = self.metadata.state_dict_metadata.get(place.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise WeightsError(f"{self.path} has no tensor {place.key}: it belongs to another network")
        if tuple(stored.size) != place.size:
            raise WeightsError(
                f"{place.key} in {self.path} has shape {tuple(stored.size)}, but config.json implies {place.size}: it "
                "belongs to another network"
            )
        return stored


class _Targets(LoadPlanner):
    """Hands the reader the views to fill."""

    def __init__(self, targets: dict[tuple[str, Shape], Tensor]) -> None:
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._targets[read_item.dest_index.fqn, tuple(read_item.dest_index.offset or ())]
        return box(target, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError


def write_checkpoint(
    path: Path,
    plan: Plan,
    fill: Callable[[Slice, Shape, Shape], Tensor],
    dtypes: Callable[[str], torch.dtype],
    threads: int,
    progress: Progress | None,
    part_bytes: int = PART_BYTES,
) -> None:
    """Write a distributed checkpoint into the directory `path`, each piece made when its turn comes.

    fill(slice, offset, shape) gives that box of the slice's HF tensor. Collective: ranks share the pieces. They are
    written in parts, each a folder that gets its name when it is complete; parts that are there already are kept.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parts = _parts(plan, lambda place: dtypes(plan.slices[place.param][0].tensor), part_bytes)
    done, total = 0, sum(len(places[rank::ranks]) for places in parts)
    for number, places in enumerate(parts):
        mine, part = places[rank::ranks], path / f"part-{number:05d}"
        if not part.exists():
            objects = plan.objects if rank == number == 0 else ()
            planner = _Stream(mine, objects, plan.slices, fill, dtypes, _after(progress, done, total))
            partial = path / f".{part.name}"
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            dist.barrier()
            writer = FileSystemWriter(partial, single_file_per_rank=threads == 1, thread_count=threads)
            dcp.save({}, storage_writer=writer, planner=planner)  # type: ignore[attr-defined]
            if rank == 0:
                partial.rename(part)
            dist.barrier()
        done += len(mine)
    if rank == 0:
        _join_parts(path, len(parts))
        torch.save({}, path / "common.pt")
        save_config(CheckpointingConfig("torch_dist", 1), str(path))
    dist.barrier()


def _after(progress: Progress | None, done: int, total: int) -> Progress | None:
    """Progress within a part as progress of the whole."""
    if progress is None:
        return None
    return lambda what, count, _: progress(what, done + count, total)


def _parts(plan: Plan, dtype: Callable[[Place], torch.dtype], part_bytes: int) -> list[list[Place]]:
    parts: list[list[Place]] = [[]]
    room = part_bytes
    for place in plan.places:
        nbytes = prod(place.shape) * dtype(place).itemsize
        if parts[-1] and nbytes > room:
            parts.append([])
            room = part_bytes
        parts[-1].append(place)
        room -= nbytes
    return parts


def _join_parts(path: Path, count: int) -> None:
    """One description of the whole from those of the parts: the same tensors, files one folder further down."""
    tensors: dict[str, Any] = {}
    files: dict[MetadataIndex, Any] = {}
    for number in range(count):
        folder = path / f"part-{number:05d}"
        metadata = FileSystemReader(folder).read_metadata()
        for key, entry in metadata.state_dict_metadata.items():
            known = tensors.setdefault(key, entry)
            if known is not entry and isinstance(entry, TensorStorageMetadata):
                known.chunks.extend(entry.chunks)
        for index, place in metadata.storage_data.items():
            files[index] = replace(place, relative_path=f"{folder.name}/{place.relative_path}")
    temporary = path / ".metadata.partial"
    with temporary.open("wb") as stream:
        pickle.dump(Metadata(tensors, storage_data=files), stream)
        os.fsync(stream.fileno())
    temporary.rename(path / ".metadata")


class _Stream(SavePlanner):
    """Tells the writer what will be written, and makes each piece when the writer asks for it."""

    def __init__(
        self,
        places: Sequence[Place],
        objects: Iterable[ShardedObject],
        slices: dict[str, tuple[Slice, ...]],
        fill: Callable[[Slice, Shape, Shape], Tensor],
        dtypes: Callable[[str], torch.dtype],
        progress: Progress | None,
    ) -> None:
        self._places = {(place.key, place.offset): place for place in places}
        self._objects = {entry.unique_key: entry for entry in objects}
        self._slices, self._fill, self._dtypes = slices, fill, dtypes
        self._progress, self._done = progress, 0

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [self._tensor_item(place) for place in self._places.values()]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([self._objects[write_item.index.fqn].data], stream)
            return stream
        place = self._places[write_item.index.fqn, tuple(write_item.index.offset or ())]
        values = self._values(place)
        self._done += 1
        if self._progress is not None:
            self._progress(place.key, self._done, len(self._places))
        return values.view((1,) * place.extra + place.shape)

    def _values(self, place: Place) -> Tensor:
        dtype = self._dtypes(self._slices[place.param][0].tensor)
        values = None
        for piece in self._slices[place.param]:
            shared = overlap(piece.param_offset, piece.shape, place.param_offset, place.shape)
            if shared is None:
                continue
            start, shape = shared
            read = self._fill(piece, _plus(piece.offset, _minus(start, piece.param_offset)), shape)
            if shape == place.shape:  # all of it: no second copy
                return read.to(dtype)
            if values is None:
                values = torch.zeros(place.shape, dtype=dtype)
            box(values, _minus(start, place.param_offset), shape).copy_(read)
        return torch.zeros(place.shape, dtype=dtype) if values is None else values

    def _tensor_item(self, place: Place) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(place.offset), torch.Size((1,) * place.extra + place.shape))
        properties = TensorProperties(dtype=self._dtypes(self._slices[place.param][0].tensor))
        return WriteItem(
            MetadataIndex(place.key, torch.Size(place.offset)),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(place.size)),
        )
