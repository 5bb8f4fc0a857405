"""Write the model, spread over any layout, as a Hugging Face directory: safetensors, index, config, tokenizer."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.hf_files import HFWeights, SafetensorsStream, split_into_files, write_index
from megatron_dapo.models.slices import Slice
from megatron_dapo.models.storage import box, storages
from megatron_dapo.models.tables import hf_shapes, megatron_slices
from megatron_dapo.parallel.capabilities import capabilities
from megatron_dapo.parallel.topology import Topology

FILE_BYTES = 4 << 30
Shape = tuple[int, ...]
Source = tuple[int, Slice]  # who sends, and which box of the tensor


@torch.no_grad()
def export_hf(
    chunks: Sequence[torch.nn.Module],
    arch: Architecture,
    topology: Topology,
    out_dir: str | Path,
    *,
    source_dir: str | Path,
    dtype: torch.dtype | None = None,
    value_head: bool = False,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the whole model to `out_dir`, in `dtype` (None: the parameters' own). Collective: every rank calls it.

    Files are shared out over the ranks and written as a stream, so a rank holds one tensor at a time. config.json,
    generation_config.json and the tokenizer are copied from `source_dir`, and so are its layers that predict further
    tokens, which are not trained. The directory appears under its name only
    when it is complete (a temporary one is renamed); an older one of that name is replaced then.
    """
    out, rank = Path(out_dir), dist.get_rank()
    temporary = out.with_name(f".{out.name}.incomplete")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    storage = storages(chunks)
    shapes = hf_shapes(arch, value_head)
    dtypes = file_dtypes(shapes, dtype or _main_dtype(storage))
    files = split_into_files(shapes, max(d.itemsize for d in dtypes.values()), file_bytes)
    untrained = _untrained(Path(source_dir), arch, shapes)
    names = file_names(len(files) + bool(untrained))
    owners = _owners(arch, topology, value_head)
    for number, tensors in enumerate(files):
        writer = number % topology.world
        stream = None
        if rank == writer:
            part = {name: shapes[name] for name in tensors}
            stream = SafetensorsStream(temporary / names[number], part, dtypes)
        for name in tensors:
            whole = _assemble(owners[name], storage, shapes[name], dtypes[name], rank, writer)
            if stream is not None and whole is not None:
                stream.add(name, whole)
        if stream is not None:
            stream.close()
    dist.barrier()
    if rank == 0:
        if untrained:
            files.append(list(untrained))
            shapes |= untrained
            dtypes |= file_dtypes(untrained, dtype or _main_dtype(storage))
            _copy_tensors(Path(source_dir), temporary / names[-1], untrained, dtypes)
        if len(files) > 1:
            total = sum(prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
            write_index(temporary, zip(names, files, strict=True), total)
        copy_companions(Path(source_dir), temporary, dtype or _main_dtype(storage))
        replace_directory(temporary, out)
    dist.barrier()


def _untrained(source: Path, arch: Architecture, shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Tensors of `source` in layers behind the last one that is trained."""
    if not any(source.glob("*.safetensors")):
        return {}
    behind = re.compile(r"model\.layers\.(\d+)\.")
    with HFWeights(source) as weights:
        found = [name for name in weights if (match := behind.match(name)) and int(match[1]) >= arch.layers]
        return {name: weights.shape(name) for name in sorted(found) if name not in shapes}


def _copy_tensors(source: Path, file: Path, shapes: dict[str, Shape], dtypes: dict[str, torch.dtype]) -> None:
    stream = SafetensorsStream(file, shapes, dtypes)
    with HFWeights(source) as weights:
        for name, shape in shapes.items():
            stream.add(name, weights.read(name, (0,) * len(shape), shape).to(dtypes[name]))
    stream.close()


def file_names(count: int) -> list[str]:
    """Hugging Face's names of `count` weight files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _main_dtype(storage: dict[str, Tensor]) -> torch.dtype:
    return next(tensor.dtype for name, tensor in storage.items() if not name.endswith("expert_bias"))


def file_dtypes(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The router's correction bias stays float32: its steps are smaller than bfloat16 resolves."""
    return {name: torch.float32 if name.endswith("e_score_correction_bias") else dtype for name in shapes}


def _owners(arch: Architecture, topology: Topology, value_head: bool) -> dict[str, list[Source]]:
    """For each HF tensor the boxes that make it up, each from the first rank that stores it."""
    owners: dict[str, list[Source]] = {}
    seen: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
    for at in topology.coordinates():
        layout = megatron_slices(arch, topology, at, te=capabilities().transformer_engine, value_head=value_head)
        for piece in layout:
            key = (piece.tensor, piece.offset, piece.shape)
            if key not in seen:
                seen.add(key)
                owners.setdefault(piece.tensor, []).append((at.rank, piece))
    return owners


def _assemble(
    sources: list[Source],
    storage: dict[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rank: int,
    writer: int,
) -> Tensor | None:
    """The whole tensor on the writer, None elsewhere. Every rank walks the same boxes in the same order."""
    device = next(iter(storage.values())).device
    whole = torch.empty(shape, dtype=dtype, device=device) if rank == writer else None
    for owner, piece in sources:
        if rank == owner:
            mine = box(storage[piece.param], piece.param_offset, piece.shape).to(dtype).contiguous()
            if whole is None:
                dist.send(mine, writer)
            else:
                box(whole, piece.offset, piece.shape).copy_(mine)
        elif whole is not None:
            received = torch.empty(piece.shape, dtype=dtype, device=device)
            dist.recv(received, owner)
            box(whole, piece.offset, piece.shape).copy_(received)
    return whole


def _companions(source: Path) -> Iterator[Path]:
    for file in sorted(source.iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".gguf") or file.name.endswith(".index.json")
        if file.is_file() and not weights and not file.name.startswith("."):
            yield file


def copy_companions(source: Path, out: Path, dtype: torch.dtype) -> None:
    """Everything of a Hugging Face directory that is not weights; config.json says the new dtype."""
    for file in _companions(source):
        shutil.copy2(file, out / file.name)
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def replace_directory(temporary: Path, out: Path) -> None:
    """Give a finished directory its name; one of that name is removed only then."""
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.rename(out, old)
    os.rename(temporary, out)
    shutil.rmtree(old, ignore_errors=True)
