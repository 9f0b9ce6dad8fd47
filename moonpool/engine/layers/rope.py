"""Rotary positions: each pair of dimensions (i, i + half) of a head is turned by an angle that grows with position."""

from __future__ import annotations

import math

import torch

from moonpool.engine.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Radians per position for each pair: [head_dim / 2], float32."""
    # float32 and in this order of operations, because that is how the models were trained and are published.
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    return frequencies.to(device)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "divisors":
        return frequencies / torch.tensor(scaling.divisors, dtype=torch.float32)
    return _llama3_scaled(frequencies, scaling)


def _llama3_scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(turns < scaling.low_freq_factor, frequencies / scaling.factor, frequencies)
    between = (turns >= scaling.low_freq_factor) & (turns <= scaling.high_freq_factor)
    return torch.where(between, blended, stretched)


def rotation(
    frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a step's tokens, each [tokens, 1, head_dim / 2]; computed once for all layers."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns x [tokens, heads, head_dim] into a new contiguous tensor."""
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned[..., half:]).addcmul_(first, sin)
    return turned
