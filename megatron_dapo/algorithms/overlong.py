"""Soft overlong punishment: a response pays gradually for running into the last stretch of the length it is allowed."""

from typing import overload

from torch import Tensor


@overload
def overlong_penalty(
    length: float, max_length: int, buffer: int, factor: float = 1.0, *, reference_unbounded: bool = False
) -> float: ...
@overload
def overlong_penalty(
    length: Tensor, max_length: int, buffer: int, factor: float = 1.0, *, reference_unbounded: bool = False
) -> Tensor: ...
def overlong_penalty(
    length: float | Tensor, max_length: int, buffer: int, factor: float = 1.0, *, reference_unbounded: bool = False
) -> float | Tensor:
    """What to add to the reward of a response of `length` tokens (DAPO, arXiv:2503.14476, eq. 13).

    0 up to max_length - buffer, then falling linearly to -factor at max_length and no further: the result lies in
    [-factor, 0]. `reference_unbounded` lets it keep falling beyond max_length, as verl does; the two differ only where
    responses may exceed max_length. A tensor of lengths gives a tensor.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong buffer must lie in (0, max_length={max_length}], got {buffer}; or disable it")
    if factor < 0:
        raise ValueError(f"overlong penalty factor must not be negative, got {factor}")
    exceed = length - (max_length - buffer)
    most = float("inf") if reference_unbounded else 1.0
    if isinstance(exceed, Tensor):
        return 0.0 - factor * (exceed / buffer).clamp(0.0, most)
    return 0.0 - factor * min(max(exceed / buffer, 0.0), most)
