"""Inverse frequencies of the rotary embedding for every kind that a config.json may name."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_dapo.models.architecture import Rope


def inverse_frequencies(rope: Rope, dim: int) -> Float[Tensor, "half"]:
    """Angle per position of each of the `dim`/2 rotated pairs, in radians.

    "linear" divides all by the factor. "llama3" divides the long wavelengths, keeps the short ones and blends between
    (Llama 3.1's rule, as in Hugging Face `modeling_rope_utils`).
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind != "llama3":
        return frequencies
    wavelength = 2 * math.pi / frequencies
    blend = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return frequencies * blend + frequencies / rope.factor * (1 - blend)
