"""Where the bytes of a layout lie when its storages are put one after another: both ends of a push agree on it."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

from megatron_dapo.models.slices import Layout, Slice

ALIGNMENT = 64  # bytes; one cache line, and enough for every dtype
ITEM_SIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True)
class Storage:
    """One local storage of a holder: C-contiguous `shape` of `dtype`, `offset` bytes into the holder's segment."""

    param: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class Segment:
    """All storages of one holder, packed. `digest` names the geometry, so that two ends can tell they mean the same."""

    storages: Mapping[str, Storage]
    nbytes: int
    digest: str


def storage_box(piece: Slice) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, shape) of a slice in its storage; a stacked storage has extra leading dimensions of extent one."""
    extra = len(piece.param_offset) - len(piece.shape)
    return piece.param_offset, (1,) * extra + piece.shape


def index_in_storage(piece: Slice, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Where the box `offset + shape` of the HF tensor lies in the storage of a slice that contains it."""
    start, _ = storage_box(piece)
    extra = len(start) - len(shape)
    inner = [s + o - p for s, o, p in zip(start[extra:], offset, piece.offset, strict=True)]
    leading = [slice(s, s + 1) for s in start[:extra]]
    return (*leading, *(slice(i, i + n) for i, n in zip(inner, shape, strict=True)))


def extents(layout: Layout) -> dict[str, tuple[int, ...]]:
    """The smallest shape of every storage that holds all its slices (padding behind the last one is not needed)."""
    found: dict[str, tuple[int, ...]] = {}
    for piece in layout:
        offset, shape = storage_box(piece)
        end = tuple(o + s for o, s in zip(offset, shape, strict=True))
        known = found.get(piece.param)
        if known is not None and len(known) != len(end):
            raise ValueError(f"storage {piece.param} has slices of {len(known)} and of {len(end)} dimensions")
        found[piece.param] = end if known is None else tuple(map(max, known, end))
    return found


def segment(layout: Layout, dtypes: Mapping[str, str]) -> Segment:
    """Pack the storages of `layout` in their order of first appearance."""
    storages: dict[str, Storage] = {}
    end = 0
    for param, shape in extents(layout).items():
        storage = Storage(param, shape, dtypes[param], -(-end // ALIGNMENT) * ALIGNMENT)
        storages[param] = storage
        end = storage.offset + storage.nbytes
    return Segment(storages, end, digest(layout, dtypes))


def share_equal(layouts: Mapping[int, Layout]) -> dict[int, Layout]:
    """The same layouts, equal ones as one object: planning looks at it once, and pickling sends it once."""
    known: dict[Layout, Layout] = {}
    first = {id(layout): layout for layout in layouts.values()}  # hashing a layout is slow, and is done once for each
    shared = {key: known.setdefault(layout, layout) for key, layout in first.items()}
    return {holder: shared[id(layout)] for holder, layout in layouts.items()}


def digest(layout: Layout, dtypes: Mapping[str, str]) -> str:
    """A short hash of a layout and its dtypes."""
    state = blake2b(digest_size=8)
    for piece in layout:
        state.update(repr((piece.tensor, piece.offset, piece.shape, piece.param, piece.param_offset)).encode())
        state.update(dtypes[piece.param].encode())
    return state.hexdigest()
