"""What is in a checkpoint: each tensor's name, shape, dtype, size and pieces, from headers alone."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dapo.models.hf_files import HFWeights, WeightsError


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
                str(weights.dtype(name)).removeprefix("torch."),
                prod(weights.shape(name)) * weights.dtype(name).itemsize,
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
