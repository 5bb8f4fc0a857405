"""A Slice says which box of a Hugging Face tensor lies where in a local storage: the word of load, export and push."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Slice:
    """The box `offset + shape` of the HF tensor `tensor` is stored at `param_offset` of the local storage `param`.

    `param_offset` may have more dimensions than `offset` (a stacked storage such as vLLM's `w13[E, 2I, H]`): the
    leading extra dimensions then have extent one.
    """

    tensor: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    param: str
    param_offset: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


Layout = tuple[Slice, ...]  # everything one holder (a rank, a vLLM worker, a file) stores
