"""Hugging Face → Megatron distributed checkpoint and back, tensor by tensor.

A directory appears under its name only when it is complete, and an interrupted conversion goes on where it stopped.
"""

import ctypes
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_tools.megatron_files import (
    PART_BYTES,
    MegatronWeights,
    Plan,
    Progress,
    Shape,
    hf_architecture,
    make_plan,
    megatron_architecture,
    write_checkpoint,
)
from checkpoint_tools.unfinished import STATE, continue_or_begin, weight_files
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.export import FILE_BYTES, copy_companions, file_dtypes, file_names, replace_directory
from megatron_dapo.models.hf_files import HFWeights, SafetensorsStream, WeightsError, split_into_files, write_index
from megatron_dapo.models.slices import Slice

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def hf_to_megatron(
    hf_dir: str | Path,
    out_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    value_head: bool = False,
    threads: int = 2,
    part_bytes: int = PART_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write the weights of a Hugging Face directory as a Megatron distributed checkpoint that any layout can load.

    `dtype` None keeps each tensor's own. Memory: one parameter per thread. Parts (of `part_bytes`) that an interrupted
    conversion had finished are kept. Collective when ranks are running: they share the work. Raises WeightsError for a
    checkpoint that is not what its config.json says.
    """
    source, out = Path(hf_dir), Path(out_dir)
    temporary = out.with_name(f".{out.name}.incomplete")
    lock = Lock()
    with HFWeights(source) as weights:
        plan = make_plan(Architecture.from_dir(source) if value_head else hf_architecture(source, weights), value_head)
        check_weights(weights, plan)
        if dist.get_rank() == 0:
            world = dist.get_world_size()
            continue_or_begin(temporary, [*weight_files(source), str(dtype), value_head, part_bytes, world])
        dist.barrier()

        def fill(piece: Slice, offset: Shape, shape: Shape) -> Tensor:
            with lock:  # files are opened when first needed
                weights.shape(piece.tensor)
            return weights.read(piece.tensor, offset, shape)

        keep_float32 = {name for name in plan.shapes if name.endswith("e_score_correction_bias")}
        write_checkpoint(
            temporary,
            plan,
            fill,
            lambda name: torch.float32 if name in keep_float32 else dtype or weights.dtype(name),
            threads,
            progress,
            part_bytes,
        )
    if dist.get_rank() == 0:
        (temporary / STATE).unlink()
        replace_directory(temporary, out)
    dist.barrier()


def megatron_to_hf(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    *,
    hf_dir: str | Path,
    dtype: torch.dtype | None = None,
    value_head: bool = False,
    file_bytes: int = FILE_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write a Megatron distributed checkpoint (of any layout; optimizer state is ignored) as a Hugging Face directory.

    config.json, generation_config.json and the tokenizer come from `hf_dir`. `dtype` None keeps the checkpoint's.
    Memory: half a layer. Files that an interrupted conversion had finished are kept. Collective when ranks
    are running: each writes some of the files.
    """
    _return_freed_memory()
    source, out = Path(hf_dir), Path(out_dir)
    plan = make_plan(megatron_architecture(source, Path(checkpoint_dir)), value_head)
    weights = MegatronWeights(Path(checkpoint_dir), plan)
    main = dtype or weights.dtype("model.norm.weight")
    dtypes = file_dtypes(plan.shapes, main)
    files = split_into_files(plan.shapes, max(d.itemsize for d in dtypes.values()), file_bytes)
    names = file_names(len(files))
    temporary = out.with_name(f".{out.name}.incomplete")
    if dist.get_rank() == 0:
        stat = (Path(checkpoint_dir) / ".metadata").stat()
        state = [str(Path(checkpoint_dir).resolve()), stat.st_mtime_ns, stat.st_size, names, str(main)]
        continue_or_begin(temporary, state)
    dist.barrier()
    for number, (file, tensors) in enumerate(zip(names, files, strict=True)):
        if number % dist.get_world_size() == dist.get_rank() and not (temporary / file).exists():
            _write_file(temporary / file, tensors, weights, plan, dtypes)
        if progress is not None:
            progress(file, number + 1, len(files))
    dist.barrier()
    if dist.get_rank() == 0:
        if len(files) > 1:
            total = sum(torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in plan.shapes.items())
            write_index(temporary, zip(names, files, strict=True), total)
        copy_companions(source, temporary, main)
        (temporary / STATE).unlink()
        replace_directory(temporary, out)
    dist.barrier()


def _return_freed_memory() -> None:
    """A freed tensor goes back to the system at once; else the allocator learns to keep blocks of its size."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


def check_weights(weights: HFWeights, plan: Plan) -> None:
    """Names, shapes and dtypes of a Hugging Face directory against its config.json, before anything is written."""
    for name, shape in plan.shapes.items():
        weights.dtype(name)
        if weights.shape(name) != shape:
            raise WeightsError(
                f"{name} in {weights.file_of(name)} has shape {weights.shape(name)}, but config.json implies {shape}"
            )
    for name, original in plan.copies.items():
        start, shape = (0,) * len(plan.shapes[name]), plan.shapes[name]
        if not torch.equal(weights.read(name, start, shape), weights.read(original, start, shape)):
            raise WeightsError(f"{name} is not equal to {original}, but Megatron's network has the two in one place")


def _write_file(
    path: Path, tensors: Sequence[str], weights: MegatronWeights, plan: Plan, dtypes: dict[str, torch.dtype]
) -> None:
    stream = SafetensorsStream(path, {name: plan.shapes[name] for name in tensors}, dtypes)
    for group in _by_block(tensors):
        values = weights.read_many(group)
        for name in group:
            stream.add(name, values.pop(name).to(dtypes[name]))  # each is freed as soon as it is written
    stream.close()


def _by_block(names: Sequence[str]) -> Iterator[list[str]]:
    """Consecutive names of one half of a layer (attention, feed-forward), or of one expert: read in one pass."""
    for _, group in groupby(names, key=_block):
        yield list(group)


def _block(name: str) -> tuple[str, ...]:
    parts = name.split(".")
    if parts[:2] != ["model", "layers"]:
        return (name,)
    return tuple(parts[2:6]) if parts[4] == "experts" else tuple(parts[2:4])
