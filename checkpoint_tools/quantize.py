"""Float8 weights with a scale per block of 128×128, as DeepSeek-V3 is published, to bfloat16 and back.

`X.weight` [o, i] in float8_e4m3fn and `X.weight_scale_inv` [⌈o/128⌉, ⌈i/128⌉] in float32 mean the product of the two.
Only plain weights can be trained; quantized ones are for serving elsewhere.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_tools.megatron_files import Progress, Shape
from checkpoint_tools.unfinished import STATE, continue_or_begin, weight_files
from megatron_dapo.models.export import FILE_BYTES, copy_companions, file_names, replace_directory
from megatron_dapo.models.hf_files import HFWeights, SafetensorsStream, WeightsError, split_into_files, write_index

BLOCK = 128
SCALE = "_scale_inv"
FLOAT8 = torch.float8_e4m3fn
PLAIN = ("embed_tokens", "lm_head", "shared_head.head", "mlp.gate", "eh_proj")  # matrices that stay as they are
CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}


@dataclass(frozen=True)
class Entry:
    """A tensor of the output, made when its turn comes."""

    shape: Shape
    dtype: torch.dtype
    make: Callable[[], Tensor]


def dequantize(
    hf_dir: str | Path,
    out_dir: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    file_bytes: int = FILE_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write the checkpoint with plain weights in `dtype`. Raises WeightsError for one that has no float8 weights."""
    with HFWeights(Path(hf_dir)) as weights:
        if not any(name.endswith(SCALE) for name in weights):
            raise WeightsError(f"{hf_dir} has no float8 weights: it can be used as it is")
        _write(Path(hf_dir), Path(out_dir), _plain(weights, dtype), dtype, None, file_bytes, progress)


def quantize(
    hf_dir: str | Path, out_dir: str | Path, *, file_bytes: int = FILE_BYTES, progress: Progress | None = None
) -> None:
    """Write the checkpoint with float8 matrices; embedding, head, router and all vectors stay as they are."""
    with HFWeights(Path(hf_dir)) as weights:
        main = weights.dtype("model.norm.weight")
        _write(Path(hf_dir), Path(out_dir), _float8(weights), main, CONFIG, file_bytes, progress)


def _plain(weights: HFWeights, dtype: torch.dtype) -> Iterator[tuple[str, Entry]]:
    for name in weights:
        if name + SCALE in weights:
            yield name, Entry(weights.shape(name), dtype, partial(_dequantized, weights, name, dtype))
        elif not name.endswith(SCALE):
            yield name, _as_it_is(weights, name)


def _as_it_is(weights: HFWeights, name: str) -> Entry:
    return Entry(weights.shape(name), weights.dtype(name), partial(weights.read_any, name))


def _dequantized(weights: HFWeights, name: str, dtype: torch.dtype) -> Tensor:
    return from_float8(weights.read_any(name), weights.read_any(name + SCALE)).to(dtype)


def _float8(weights: HFWeights) -> Iterator[tuple[str, Entry]]:
    for name in weights:
        shape = weights.shape(name)
        if len(shape) < 2 or any(name.endswith(f"{kept}.weight") for kept in PLAIN):
            yield name, _as_it_is(weights, name)
            continue
        blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        yield name, Entry(shape, FLOAT8, partial(_quantized, weights, name, 0))
        yield name + SCALE, Entry(blocks, torch.float32, partial(_quantized, weights, name, 1))


def _quantized(weights: HFWeights, name: str, part: int) -> Tensor:
    return to_float8(weights.read_any(name))[part]


def to_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 values and the scale of each block: the block's largest value becomes float8's largest."""
    largest = _blocks(weight.float().abs()).amax((1, 3)).clamp_min(1e-12)
    scale = largest / torch.finfo(FLOAT8).max
    return (weight.float() / _spread(scale, weight.shape)).to(FLOAT8), scale


def from_float8(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 weights that float8 values and scales mean."""
    return values.float() * _spread(scale, values.shape)


def _blocks(matrix: Tensor) -> Tensor:
    """[o, i] as [⌈o/128⌉, 128, ⌈i/128⌉, 128], zeros at the edges."""
    rows, columns = (-(-n // BLOCK) for n in matrix.shape)
    padded = matrix.new_zeros(rows * BLOCK, columns * BLOCK)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.view(rows, BLOCK, columns, BLOCK)


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """The scale of every element."""
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def _write(
    source: Path,
    out: Path,
    entries: Iterable[tuple[str, Entry]],
    main: torch.dtype,
    quantization: dict[str, Any] | None,
    file_bytes: int,
    progress: Progress | None,
) -> None:
    """One tensor in memory at a time; the directory gets its name when it is complete.

    Files that an interrupted conversion had finished are kept.
    """
    found = dict(entries)
    shapes = {name: entry.shape for name, entry in found.items()}
    dtypes = {name: entry.dtype for name, entry in found.items()}
    files = split_into_files(shapes, 4, file_bytes)
    names = file_names(len(files))
    temporary = out.with_name(f".{out.name}.incomplete")
    continue_or_begin(temporary, [*weight_files(source), names, str(main), quantization])
    done = 0
    for file, tensors in zip(names, files, strict=True):
        done += len(tensors)
        if not (temporary / file).exists():
            _write_file(temporary / file, {name: found[name] for name in tensors})
        if progress is not None:
            progress(file, done, len(found))
    if len(files) > 1:
        total = sum(prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
        write_index(temporary, zip(names, files, strict=True), total)
    copy_companions(source, temporary, main)
    config = json.loads((temporary / "config.json").read_text())
    config.pop("quantization_config", None)
    config |= {} if quantization is None else {"quantization_config": quantization}
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (temporary / STATE).unlink()
    replace_directory(temporary, out)


def _write_file(path: Path, entries: dict[str, Entry]) -> None:
    shapes = {name: entry.shape for name, entry in entries.items()}
    stream = SafetensorsStream(path, shapes, {name: entry.dtype for name, entry in entries.items()})
    for name, entry in entries.items():
        stream.add(name, entry.make())
    stream.close()
