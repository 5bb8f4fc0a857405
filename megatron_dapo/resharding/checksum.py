"""A checksum that adds up: a box has the same sum however it was cut on its way, so senders need not agree on cuts."""

import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_checked(number: int, push: int, every: int) -> bool:
    """Whether a push checks the box of this number: with `every=n` every nth, another nth in each push."""
    return (number + push) % every == 0


def checksum(box: Tensor) -> int:
    """Sum of the bit patterns of all elements, modulo 2**64."""
    words = box.detach().view(WORDS[box.element_size()])
    if box.device.type == "cpu":  # torch would cast all to 64 bits before it sums: numpy is ten times as fast
        return int(words.numpy().sum(dtype="int64")) % 2**64
    return int(words.sum(dtype=torch.int64)) % 2**64
