"""What a vLLM engine of an architecture will store, before there is one: the pure twin of `vllm_layout`."""

from collections.abc import Iterator
from functools import lru_cache

from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.slices import Layout, Slice
from megatron_dapo.models.tables import ExpertNames, expert_names, hf_shapes
from megatron_dapo.parallel.topology import LayoutError

VOCAB_MULTIPLE = 64  # vLLM pads embedding and head to a multiple of this
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
FUSED_LATENT = {"q_a_proj": "fused_qkv_a_proj", "kv_a_proj_with_mqa": "fused_qkv_a_proj"}
ROWS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj"}
COLUMNS = {"o_proj", "down_proj"}


def rollout_layouts(arch: Architecture, tensor_parallel_size: int, expert_parallel: bool = False) -> list[Layout]:
    """The layout of every tensor-parallel rank of one engine. With `expert_parallel` experts are whole on their rank.

    Raises LayoutError naming what does not divide.
    """
    check_divides(arch, tensor_parallel_size, expert_parallel)
    return [tuple(rank_slices(arch, tensor_parallel_size, r, expert_parallel)) for r in range(tensor_parallel_size)]


def check_divides(arch: Architecture, tp: int, expert_parallel: bool) -> None:
    """Raises LayoutError naming what an engine of this size would not divide."""
    if wrong := undivided(arch, tp, expert_parallel):
        raise LayoutError(f"rollout.tensor_parallel_size={tp} does not divide " + ", nor ".join(wrong))


def undivided(arch: Architecture, tp: int, expert_parallel: bool) -> list[str]:
    """What of this model vLLM cannot cut into `tp` parts."""
    divides = {f"the {arch.heads} attention heads": arch.heads % tp == 0}
    if not arch.latent:
        fits = arch.kv_heads % tp == 0 if arch.kv_heads >= tp else tp % arch.kv_heads == 0
        divides[f"the {arch.kv_heads} KV heads (or is a multiple of them)"] = fits
    divides[f"the vocabulary of {arch.vocab}, padded to {padded_vocab(arch)}"] = padded_vocab(arch) % tp == 0
    if arch.mixture is not None and expert_parallel:
        divides[f"the {arch.experts} experts"] = arch.experts % tp == 0
    elif arch.mixture is not None:
        divides[f"the expert width {arch.mixture.ffn}"] = arch.mixture.ffn % tp == 0
    return [name for name, fits in divides.items() if not fits]


def padded_vocab(arch: Architecture) -> int:
    return -(-arch.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def rank_slices(arch: Architecture, tp: int, rank: int, expert_parallel: bool) -> Iterator[Slice]:
    fused_rows: dict[str, int] = {}  # rows of each fused storage so far
    for tensor, shape in hf_shapes(arch).items():
        path, _, leaf = tensor.rpartition(".")
        parent, _, last = path.rpartition(".")
        if ".experts." in tensor:
            continue
        start, rows, columns = shard(arch, last, shape, tp, rank)
        storage = ".".join(filter(None, (parent, fused_name(arch, last), leaf)))
        at = fused_rows.get(storage, 0)
        if rows > 0:
            yield Slice(tensor, start, (rows, *columns), storage, (at, *(0,) * len(columns)))
        fused_rows[storage] = at + rows
    for layer in arch.mixture.layers if arch.mixture else ():
        yield from expert_slices(arch, layer, tp, rank, expert_parallel)


def fused_name(arch: Architecture, last: str) -> str:
    """The layer in which vLLM keeps the HF layer `last`; its parts come in the order of the HF tensors."""
    if arch.latent is None:
        return FUSED.get(last, last)
    names = FUSED | FUSED_LATENT if arch.latent.q_rank is not None else FUSED
    return last if last == "q_proj" else names.get(last, last)


def shard(
    arch: Architecture, last: str, shape: tuple[int, ...], tp: int, rank: int
) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """(offset, rows, other extents) of what this rank stores of a tensor that is no expert's."""
    zeros = (0,) * (len(shape) - 1)
    if last in ("embed_tokens", "lm_head"):
        chunk = padded_vocab(arch) // tp
        return (rank * chunk, *zeros), min(max(arch.vocab - rank * chunk, 0), chunk), shape[1:]
    if last in ("k_proj", "v_proj") and arch.kv_heads < tp:
        rows = arch.head_dim
        return (rank * arch.kv_heads // tp * rows, *zeros), rows, shape[1:]
    if last in ROWS:
        rows = shape[0] // tp
        return (rank * rows, *zeros), rows, shape[1:]
    if last in COLUMNS:
        columns = shape[1] // tp
        return (0, rank * columns), shape[0], (columns,)
    return (0,) * len(shape), shape[0], shape[1:]


def expert_slices(arch: Architecture, layer: int, tp: int, rank: int, expert_parallel: bool) -> Iterator[Slice]:
    assert arch.mixture is not None
    names = expert_names(arch, f"model.layers.{layer}.")
    experts, width, hidden = arch.mixture.experts, arch.mixture.ffn, arch.hidden
    storage = names.expert.removesuffix(".{}") + ".routed_experts."
    w13, w2 = storage + "w13_weight", storage + "w2_weight"
    first, count = (rank * experts // tp, experts // tp) if expert_parallel else (0, experts)
    start, rows = (0, width) if expert_parallel else (rank * width // tp, width // tp)
    up_shape, down_shape, up_at, down_at = (rows, hidden), (hidden, rows), (start, 0), (0, start)
    for local in range(count):
        gate, up, down = projections(names, first + local)
        yield Slice(gate, up_at, up_shape, w13, (local, 0, 0))
        yield Slice(up, up_at, up_shape, w13, (local, rows, 0))
        yield Slice(down, down_at, down_shape, w2, (local, 0, 0))


@lru_cache(maxsize=2**18)
def projections(names: ExpertNames, expert: int) -> tuple[str, str, str]:
    """The same strings for every rank."""
    return names.projections(expert)
