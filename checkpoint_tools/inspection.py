"""What is in a checkpoint: each tensor's name, shape, dtype, size and pieces, from headers alone."""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dapo.models.hf_files import HFWeights, WeightsError

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}


def item_bits(stored: str) -> int:
    """Bits of an element, from the word in a safetensors header: the first number in it (BOOL has none, and eight)."""
    return int(found[0]) if (found := re.search(r"\d+", stored)) else 8


@dataclass(frozen=True)
class TensorInfo:
    """One tensor. `pieces`: in how many boxes it is stored (a Hugging Face tensor is one)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    pieces: int
    where: str


def inspect_checkpoint(path: str | Path) -> list[TensorInfo]:
    """The tensors of a Hugging Face directory or a Megatron distributed checkpoint, in name order.

    Raises WeightsError for a directory that is neither.
    """
    directory = Path(path)
    if (directory / ".metadata").is_file():
        return _megatron(directory)
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory")
    with HFWeights(directory) as weights:
        return [
            TensorInfo(
                name,
                weights.shape(name),
                DTYPES.get(weights.stored_dtype(name), weights.stored_dtype(name)),
                prod(weights.shape(name)) * item_bits(weights.stored_dtype(name)) // 8,
                1,
                weights.file_of(name).name,
            )
            for name in sorted(weights)
        ]


def _megatron(directory: Path) -> list[TensorInfo]:
    metadata = FileSystemReader(directory).read_metadata()
    files: dict[str, set[str]] = {}
    for index, place in (metadata.storage_data or {}).items():
        files.setdefault(index.fqn, set()).add(place.relative_path)
    return [
        TensorInfo(
            name,
            tuple(entry.size),
            str(entry.properties.dtype).removeprefix("torch."),
            prod(entry.size) * entry.properties.dtype.itemsize,
            len(entry.chunks),
            ", ".join(sorted(files.get(name, ()))),
        )
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    ]
