"""RoPE's inverse frequencies, computed in float32 in the order transformers computes them."""

from __future__ import annotations

import math

import torch
from atoll.trainer.megatron.architecture import Architecture, Llama3Rope
from torch import Tensor


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """float32 [head_dim / 2], scaled as the model says (Su et al., 2021; linear: Chen et al., 2023; Llama 3.1)."""
    width = architecture.head_dim
    plain = 1.0 / (architecture.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    scaling = architecture.rope_scaling
    if scaling is None:
        return plain
    if isinstance(scaling, Llama3Rope):
        return _llama3(plain, scaling)
    return plain / scaling


def _llama3(plain: Tensor, scaling: Llama3Rope) -> Tensor:
    wavelength = 2 * math.pi / plain
    longest = scaling.original_length / scaling.low_freq_factor
    shortest = scaling.original_length / scaling.high_freq_factor
    scaled = torch.where(wavelength > longest, plain / scaling.factor, plain)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (scaling.original_length / wavelength - scaling.low_freq_factor) / span
    between = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, scaled)
