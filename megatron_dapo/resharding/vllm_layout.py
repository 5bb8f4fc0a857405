"""What one vLLM worker stores, as slices of the HF tensors, read from the attributes of its live model.

| layer | storage | slices |
|---|---|---|
| vocabulary (embedding, head) | rows of this rank, padding behind them | one chunk of rows |
| QKV | `[q; k; v]` rows of this rank | three; a KV head is replicated when there are fewer than ranks |
| merged columns (gate/up, MLA down) | this rank's rows of every part, one below the other | one per part |
| column, row, replicated linear | rows / columns / all | one |
| routed experts | `w13[e, gate rows then up rows, h]`, `w2[e, h, columns]` | per local expert and matrix |
| parameters that no layer shards (norms, router bias) | the whole tensor | one |

Anything else gets its full HF tensor through the model's own loader, and is named in `VllmLayout.full`.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import Tensor, nn
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from megatron_dapo.models.slices import Layout, Slice

FULL = "full:"  # storages of this prefix are whole HF tensors that go through the model's own loader


@dataclass(frozen=True)
class VllmLayout:
    """One worker's layout, the dtype of each of its storages, and the HF tensors it must be given whole."""

    slices: Layout
    dtypes: Mapping[str, str]
    full: tuple[str, ...]


class Unknown(Exception):
    """This parameter's storage is not understood."""


@dataclass(frozen=True)
class Part:
    """Rows `start : start + rows` of one HF tensor (all of it in its other dimension), at `at` in the fused storage."""

    tensor: str
    start: int
    rows: int
    at: int


def model_layout(model: nn.Module, directory: str) -> VllmLayout:
    """Describe every parameter of a live model; shapes of tensors that must travel whole come from `directory`."""
    slices: list[Slice] = []
    dtypes: dict[str, str] = {}
    full: list[str] = []
    seen: set[int] = set()
    names = fused_names(model)
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or isinstance(module, MLAAttention):
                continue  # a tied head is the embedding; latent attention's own are derived from `kv_b_proj`
            seen.add(id(parameter))
            try:
                found = list(parameter_slices(path, module, leaf, parameter, names))
            except Unknown:
                found = list(whole_tensors(path, leaf, names, directory))
                full.extend(piece.tensor for piece in found)
            slices.extend(found)
            dtypes.update({piece.param: str(parameter.dtype).removeprefix("torch.") for piece in found})
    return VllmLayout(tuple(slices), dtypes, tuple(full))


def fused_names(model: nn.Module) -> dict[str, list[str]]:
    """Fused layer and its HF parts in order, from the model's own tables (`qkv_proj`: `q_proj`, `k_proj`, `v_proj`)."""
    names: dict[str, list[str]] = {}
    mapper = getattr(model, "hf_to_vllm_mapper", None)  # vLLM's models declare either table, or none
    for part, (fused, _) in (mapper.orig_to_new_stacked if mapper is not None else {}).items():
        parts = names.setdefault(fused.split(".")[-1], [])
        if part.split(".")[-1] not in parts:
            parts.append(part.split(".")[-1])
    return names | {fused: list(parts) for fused, parts in getattr(model, "packed_modules_mapping", {}).items()}


def parameter_slices(
    path: str, module: nn.Module, leaf: str, parameter: Tensor, names: Mapping[str, list[str]]
) -> Iterator[Slice]:
    """The slices of one parameter. Raises Unknown for a layer this module does not understand."""
    storage = f"{path}.{leaf}" if path else leaf
    if isinstance(module, RoutedExperts):
        yield from expert_slices(module, leaf, storage)
    elif isinstance(module, VocabParallelEmbedding) and leaf == "weight":
        index = module.shard_indices
        rows = index.org_vocab_end_index - index.org_vocab_start_index
        if module.num_added_embeddings:
            raise Unknown
        yield from row_slices([Part(storage, index.org_vocab_start_index, rows, 0)], storage, (module.embedding_dim,))
    elif isinstance(module, LinearBase) and leaf in ("weight", "bias"):
        yield from linear_slices(path, module, leaf, storage, names)
    elif sharded(parameter):
        raise Unknown
    else:
        yield Slice(storage, (0,) * parameter.ndim, tuple(parameter.shape), storage, (0,) * parameter.ndim)


def sharded(parameter: Tensor) -> bool:
    """A parameter that is not simply copied when it is loaded belongs to a layer with its own idea of sharding."""
    return getattr(parameter, "weight_loader", default_weight_loader) is not default_weight_loader


def linear_slices(
    path: str, module: LinearBase, leaf: str, storage: str, names: Mapping[str, list[str]]
) -> Iterator[Slice]:
    if isinstance(module, RowParallelLinear):
        rows, columns = module.output_size, module.input_size_per_partition
        if leaf == "bias":
            yield Slice(storage, (0,), (rows,), storage, (0,))
        else:
            yield Slice(storage, (0, module.tp_rank * columns), (rows, columns), storage, (0, 0))
        return
    tail = () if leaf == "bias" else (module.input_size,)
    parent, _, last = path.rpartition(".")
    parts = linear_parts(module, [f"{parent}.{name}.{leaf}" for name in names.get(last, [last])])
    if sum(part.rows for part in parts) != sum(module.output_partition_sizes):
        raise Unknown
    yield from row_slices(parts, storage, tail)


def linear_parts(module: LinearBase, tensors: list[str]) -> list[Part]:
    """The rows of each HF tensor that a (fused) linear layer of this rank stores."""
    if isinstance(module, QKVParallelLinear):
        kv_rank = module.tp_rank // module.num_kv_head_replicas
        heads = [(module.num_heads, module.tp_rank, module.head_size)]
        heads += [(module.num_kv_heads, kv_rank, module.head_size), (module.num_kv_heads, kv_rank, module.v_head_size)]
        sizes = [(count * width, rank) for count, rank, width in heads]
    elif isinstance(module, MergedColumnParallelLinear):
        sizes = [(size // module.tp_size, module.tp_rank) for size in module.output_sizes]
    elif isinstance(module, ColumnParallelLinear):
        sizes = [(module.output_size_per_partition, module.tp_rank)]
    else:
        sizes = [(module.output_size, 0)]
    if len(sizes) != len(tensors):
        raise Unknown
    at = 0
    parts = []
    for tensor, (rows, rank) in zip(tensors, sizes, strict=True):
        parts.append(Part(tensor, rank * rows, rows, at))
        at += rows
    return parts


def row_slices(parts: list[Part], storage: str, tail: tuple[int, ...]) -> Iterator[Slice]:
    zeros = (0,) * len(tail)
    for part in parts:
        if part.rows > 0:
            yield Slice(part.tensor, (part.start, *zeros), (part.rows, *tail), storage, (part.at, *zeros))


def expert_slices(module: RoutedExperts, leaf: str, storage: str) -> Iterator[Slice]:
    """Stacked experts as the checkpoint has them: what the kernel pads or reorders is the installer's business."""
    config = module.moe_config
    parallel = config.moe_parallel_config
    redundant = config.num_experts != config.num_logical_experts
    if leaf not in ("w13_weight", "w2_weight") or not config.is_act_and_mul or redundant:
        raise Unknown
    rows = config.intermediate_size // parallel.tp_size
    start = parallel.tp_rank * rows
    hidden = config.hidden_dim_unpadded
    gate, up, down = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
    for expert in range(config.num_logical_experts):
        local = module.expert_map_manager.map_global_to_local(expert)
        if local < 0:
            continue
        name = f"{module.layer_name}.{expert}"
        if leaf == "w13_weight":
            for part, at in ((gate, 0), (up, rows)):
                yield Slice(f"{name}.{part}.weight", (start, 0), (rows, hidden), storage, (local, at, 0))
        else:
            yield Slice(f"{name}.{down}.weight", (0, start), (hidden, rows), storage, (local, 0, 0))


def whole_tensors(path: str, leaf: str, names: Mapping[str, list[str]], directory: str) -> Iterator[Slice]:
    """The HF tensors behind a parameter that is not understood, whole; their shapes are in the checkpoint's headers."""
    parent, _, last = path.rpartition(".")
    for part in names.get(last, [last]):
        tensor = ".".join(filter(None, (parent, part, leaf)))
        shape = checkpoint_shapes(directory).get(tensor)
        if shape is None:
            raise ValueError(
                f"vLLM's parameter {path}.{leaf} is of a layer type this bridge does not know, and {directory} has no "
                f"tensor {tensor} from which to learn its full shape"
            )
        yield Slice(tensor, (0,) * len(shape), shape, FULL + tensor, (0,) * len(shape))


@cache
def checkpoint_shapes(directory: str) -> dict[str, tuple[int, ...]]:
    """Tensor shapes from the headers of the safetensors files of a directory."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in Path(directory).glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes
