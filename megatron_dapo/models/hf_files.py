"""A Hugging Face directory's safetensors: find every tensor, read only the boxes asked for, write files as a stream."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_dapo.errors import UserError

INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()} | {torch.float8_e4m3fn: "F8_E4M3"}  # float8: only to write


class WeightsError(UserError, ValueError):
    """A checkpoint that cannot be read as the network it claims to be."""


@dataclass
class HFWeights:
    """The tensors of one directory. Use as a context manager; files are opened when first needed.

    Raises WeightsError for a directory without weights, a shard that the index names and that is missing, and a file
    that is cut off or no safetensors.
    """

    path: Path
    _where: dict[str, Path] = field(init=False)
    _open: dict[Path, Any] = field(default_factory=dict, init=False)
    _stack: ExitStack = field(default_factory=ExitStack, init=False)

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        self._where = _locate(self.path)

    def __enter__(self) -> "HFWeights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor. Raises WeightsError naming the tensor that no file has."""
        if name not in self._where:
            raise WeightsError(f"{self.path} has no tensor {name}, which its config.json requires")
        return self._where[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the file's header. Raises WeightsError for one that is not plain floating point."""
        stored = self.stored_dtype(name)
        if stored not in _DTYPES:
            raise WeightsError(
                f"{name} in {self.file_of(name)} has dtype {stored}; only float32, bfloat16 and float16 weights can be "
                "loaded (first run `megatron-dapo convert dequantize`)"
            )
        return _DTYPES[stored]

    def stored_dtype(self, name: str) -> str:
        """The header's own word, such as BF16 or F8_E4M3."""
        return self._handle(name).get_slice(name).get_dtype()

    def read_any(self, name: str) -> Tensor:
        """A whole tensor of whatever dtype."""
        return self._handle(name).get_tensor(name)

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The box `offset + shape` of a tensor; only its bytes are read. Raises WeightsError for a non-float dtype."""
        self.dtype(name)
        whole = self._handle(name).get_slice(name)
        return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]

    def _handle(self, name: str) -> Any:
        file = self.file_of(name)
        if file not in self._open:
            self._open[file] = self._stack.enter_context(_opened(file))
        return self._open[file]


def _locate(path: Path) -> dict[str, Path]:
    index = path / INDEX
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"]
        missing = sorted({file for file in names.values() if not (path / file).is_file()})
        if missing:
            raise WeightsError(f"{path}: {INDEX} names {', '.join(missing)}, which is missing; download it again")
        return {name: path / file for name, file in names.items()}
    where: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        with _opened(file) as handle:
            where |= dict.fromkeys(handle.keys(), file)
    if not where:
        raise WeightsError(f"{path} has no weights: neither {INDEX} nor any *.safetensors")
    return where


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise WeightsError(f"{file} is not a complete safetensors file ({error}); download it again") from error


class SafetensorsStream:
    """Writes one safetensors file tensor by tensor: the header first, then the bytes as they come.

    So a file of many gigabytes needs the memory of one tensor. `add` must follow the order of `shapes`. The file is
    called `<file>.part` until `close`.
    """

    def __init__(self, file: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + prod(shape) * dtypes[name].itemsize
            header[name] = {"dtype": _NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._left = iter(shapes.items())
        self._path = file
        self._file = file.with_name(f"{file.name}.part").open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor. Raises ValueError when it is not the next one of the header."""
        expected, shape = next(self._left)
        if name != expected or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"expected {expected} {shape} next, got {name} {tuple(tensor.shape)}")
        self._file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Make the file durable and give it its name. Raises ValueError when tensors of the header are missing."""
        missing = next(self._left, None)
        if missing is not None:
            raise ValueError(f"{self._path} lacks {missing[0]} and what follows it")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._file.name, self._path)


def split_into_files(shapes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int) -> list[list[str]]:
    """Tensor names in files of at most `limit` bytes (a larger tensor has a file of its own), in the given order."""
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        nbytes = prod(shape) * itemsize
        if files[-1] and size + nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def write_index(path: Path, files: Iterable[tuple[str, Iterable[str]]], total_bytes: int) -> None:
    """The index that maps each tensor to its file."""
    weight_map = {name: file for file, names in files for name in names}
    (path / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2) + "\n"
    )
