"""What one source sends to one destination, cut into rounds of bounded size, each message with its own checksums.

A destination's storages are taken in order and filled up round by round: a round holds about `bucket_bytes` of them. In
every round each source sends at most one message with all its pieces of these storages. A destination that takes one
round after the other has every storage complete at the end of a round, and never holds more than two rounds of bytes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron_dapo.models.slices import Layout
from megatron_dapo.resharding.checksum import checksum, is_checked
from megatron_dapo.resharding.layouts import ITEM_SIZE, Segment, index_in_storage
from megatron_dapo.resharding.memory import torch_dtype
from megatron_dapo.resharding.plan import Transfer

ALIGNMENT = 8  # bytes, of every piece; and a checksum has as many
DEFAULT_BUCKET_BYTES = 64 * 2**20


class ChecksumError(RuntimeError):
    """What arrived is not what was sent."""


class TransferError(RuntimeError):
    """A peer of a push is gone or silent; the push is incomplete and its destinations must not be used."""


@dataclass(frozen=True)
class Piece:
    """One box on its way into slice `slice` of the destination; `at` is its place in the message, in bytes."""

    slice: int
    offset: tuple[int, ...]  # in the HF tensor
    shape: tuple[int, ...]
    at: int


@dataclass(frozen=True)
class Message:
    """The pieces of one source in one round; behind them, a checksum of each."""

    pieces: tuple[Piece, ...]
    nbytes: int

    @property
    def sums_at(self) -> int:
        return self.nbytes - ALIGNMENT * len(self.pieces)


def storage_rounds(place: Segment, bucket_bytes: int) -> list[list[str]]:
    """The storages of a destination in rounds of at most `bucket_bytes`; a larger one (see `parts`) has its own."""
    rounds: list[list[str]] = []
    room = 0
    for param, storage in place.storages.items():
        if not rounds or storage.nbytes > room:
            rounds.append([])
            room = bucket_bytes
        rounds[-1].append(param)
        room -= storage.nbytes
    return rounds


def messages(
    transfers: Iterable[Transfer], layout: Layout, dtypes: Mapping[str, str], rounds: Sequence[Sequence[str]]
) -> dict[int, tuple[Message, list[Transfer]]]:
    """Per round, the message of one source to one destination, and the transfers behind its pieces, in order."""
    round_of = {param: r for r, params in enumerate(rounds) for param in params}
    sorted_in: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        sorted_in.setdefault(round_of[layout[transfer.destination_slice].param], []).append(transfer)
    made = {}
    for r in sorted(sorted_in):
        pieces, end = [], 0
        for t in sorted_in[r]:
            pieces.append(Piece(t.destination_slice, t.offset, t.shape, end))
            size = prod(t.shape) * ITEM_SIZE[dtypes[layout[t.destination_slice].param]]
            end += -(-size // ALIGNMENT) * ALIGNMENT
        made[r] = (Message(tuple(pieces), end + ALIGNMENT * len(pieces)), sorted_in[r])
    return made


@torch.no_grad()
def pack(
    message: Message,
    transfers: Sequence[Transfer],
    ours: Layout,
    theirs: Layout,
    params: Callable[[str], Tensor],
    dtypes: Mapping[str, str],
    buffer: Tensor,
    push: int = 0,
    check_every: int = 1,
) -> Tensor:
    """Fill a byte buffer with a message, casting to the destination's dtypes. Returns the part that was filled.

    `push` and `check_every` say which checksums are made, see `is_checked`.
    """
    sums = buffer[message.sums_at : message.nbytes].view(torch.int64)
    for i, (piece, t) in enumerate(zip(message.pieces, transfers, strict=True)):
        source = ours[t.source_slice]
        box = params(source.param)[index_in_storage(source, t.offset, t.shape)]
        target = piece_view(buffer, piece, torch_dtype(dtypes[theirs[piece.slice].param]))
        box = box.reshape(piece.shape).to(target.dtype)
        target.copy_(box)
        if is_checked(i, push, check_every):
            sums[i] = signed(checksum(box))
    return buffer[: message.nbytes]


@torch.no_grad()
def unpack(
    message: Message,
    buffer: Tensor,
    layout: Layout,
    storages: Mapping[str, Tensor],
    push: int = 0,
    check_every: int = 1,
) -> None:
    """Put every piece of a message where it belongs. Raises ChecksumError naming the tensor that was damaged."""
    sums = buffer[message.sums_at : message.nbytes].view(torch.int64).tolist()
    for i, (piece, expected) in enumerate(zip(message.pieces, sums, strict=True)):
        target = layout[piece.slice]
        storage = storages[target.param]
        box = piece_view(buffer, piece, storage.dtype)
        if is_checked(i, push, check_every) and signed(checksum(box)) != expected:
            raise damaged(target.tensor, piece.offset, piece.shape)
        place = storage[index_in_storage(target, piece.offset, piece.shape)]
        place.copy_(box.view(place.shape))


def piece_view(buffer: Tensor, piece: Piece, dtype: torch.dtype) -> Tensor:
    return buffer[piece.at : piece.at + prod(piece.shape) * dtype.itemsize].view(dtype).view(piece.shape)


def damaged(tensor: str, offset: Sequence[int], shape: Sequence[int]) -> ChecksumError:
    box = ", ".join(f"{o}:{o + n}" for o, n in zip(offset, shape, strict=True))
    return ChecksumError(f"{tensor}[{box}] arrived damaged: its checksum is not that of what was sent")


def signed(total: int) -> int:
    """An unsigned 64-bit number as the signed one with the same bits."""
    return total - 2**64 if total >= 2**63 else total


def empty_storages(place: Segment, params: Sequence[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Room for the storages of one round."""
    return {
        p: torch.empty(place.storages[p].shape, dtype=torch_dtype(place.storages[p].dtype), device=device)
        for p in params
    }


def to_json(rounds: Mapping[int, Message]) -> dict[str, list[list]]:
    """Messages as plain lists, for a peer that must know what it is going to get."""
    return {str(r): [[p.slice, p.offset, p.shape, p.at] for p in m.pieces] + [[m.nbytes]] for r, m in rounds.items()}


def from_json(plain: Mapping[str, list[list]]) -> dict[int, Message]:
    return {
        int(r): Message(tuple(Piece(s, tuple(o), tuple(n), at) for s, o, n, at in rows[:-1]), rows[-1][0])
        for r, rows in plain.items()
    }
