"""Load a Hugging Face checkpoint into this rank's model chunks: exactly the boxes that the rank stores are read."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.hf_files import HFWeights, WeightsError
from megatron_dapo.models.storage import box, check_cover, storages
from megatron_dapo.models.tables import VALUE_HEAD, hf_shapes, megatron_slices
from megatron_dapo.parallel.capabilities import capabilities
from megatron_dapo.parallel.topology import Topology


@torch.no_grad()
def load_hf(
    chunks: Sequence[torch.nn.Module],
    arch: Architecture,
    topology: Topology,
    path: str | Path,
    *,
    value_head: bool = False,
) -> None:
    """Fill the chunks of this rank from the safetensors in `path`, casting to the parameters' dtype.

    Padding rows of the vocabulary become zero. A value head that the checkpoint does not have keeps its zeros.
    Raises WeightsError (no weights, missing shard or tensor, odd shape, truncated file, quantized dtype) before any
    parameter is changed where a header tells.
    """
    layout = megatron_slices(
        arch, topology, dist.get_rank(), te=capabilities().transformer_engine, value_head=value_head
    )
    storage = storages(chunks)
    uncovered = check_cover(storage, layout)
    with HFWeights(Path(path)) as weights:
        optional = {VALUE_HEAD} - set(weights)
        wanted = [piece for piece in layout if piece.tensor not in optional]
        _check_shapes(weights, {piece.tensor for piece in wanted}, hf_shapes(arch, value_head))
        for name, elements in uncovered.items():
            if elements:
                storage[name].zero_()
        for piece in sorted(wanted, key=lambda piece: (weights.file_of(piece.tensor), piece.tensor)):
            values = weights.read(piece.tensor, piece.offset, piece.shape)
            box(storage[piece.param], piece.param_offset, piece.shape).copy_(values)


def _check_shapes(weights: HFWeights, names: set[str], expected: dict[str, tuple[int, ...]]) -> None:
    for name in sorted(names):
        shape = weights.shape(name)
        if shape != expected[name]:
            raise WeightsError(
                f"{name} in {weights.file_of(name)} has shape {shape}, but config.json of {weights.path} implies "
                f"{expected[name]}"
            )
