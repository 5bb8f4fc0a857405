"""The local storages behind the slice table's parameter names, and the view of one box inside them."""

from collections.abc import Iterable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_dapo.models.slices import Slice


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside Megatron's data-parallel and half-precision wrappers."""
    while isinstance(model, DistributedDataParallel | Float16Module):
        model = model.module
    return model


def storages(chunks: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Every parameter (and the router's expert bias, a buffer) by the slice table's name, "<chunk>.<name>"."""
    found: dict[str, Tensor] = {}
    for i, chunk in enumerate(chunks):
        model = unwrap(chunk)
        found |= {f"{i}.{name}": parameter.data for name, parameter in model.named_parameters()}
        found |= {f"{i}.{name}": buffer for name, buffer in model.named_buffers() if name.endswith(".expert_bias")}
    return found


def box(storage: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A view of the box `offset + shape`."""
    return storage[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def check_cover(storage: dict[str, Tensor], layout: Iterable[Slice]) -> dict[str, int]:
    """Elements of each storage that the layout leaves uncovered (padding).

    Raises ValueError when model and table disagree: a storage without a slice, a slice without a storage, or more
    elements than the storage has.
    """
    left = {name: tensor.numel() for name, tensor in storage.items()}
    for piece in layout:
        if piece.param not in left:
            raise ValueError(f"the slice table names {piece.param}, but the model has no such parameter")
        left[piece.param] -= piece.numel
    for name, elements in left.items():
        if elements == storage[name].numel():
            raise ValueError(f"the slice table has no row for the model's parameter {name}")
        if elements < 0:
            raise ValueError(f"the slice table covers {name} {tuple(storage[name].shape)} more than once")
    return left
