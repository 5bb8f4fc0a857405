"""What an algorithm saw, left for others to reduce: a mean of means over micro-batches is not the mean of the whole."""

from typing import Literal, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

Kind = Literal["mean", "max", "min", "std", "sample_std", "effective_share"]


class Measured(NamedTuple):
    """The `values` that count where `mask` is set, one per token or per sequence, and what is to be told of them.

    "std" divides by their number, "sample_std" by one less; "effective_share" is (Σw)² / (n·Σw²), the share of n
    weights that would be worth as much if all were equal.
    """

    kind: Kind
    values: Float[Tensor, "*shape"]
    mask: Bool[Tensor, "*shape"]
