"""Rotary positions (Su et al. 2021) over neighboring pairs of elements, with Llama 3.1's stretched frequencies."""

import math
from typing import Any

import torch
from torch import Tensor

ROPE_DEFAULTS = {
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def apply_scaling(freqs: Tensor, **kwargs: Any) -> Tensor:
    """Stretch the frequencies whose waves are long against the sequences that a model was first trained on.

    Args:
        freqs: radians per position, `[head/2]`.
        **kwargs: changes of `ROPE_DEFAULTS`.

    Returns:
        `[head/2]`: short waves as they are, long ones `factor` times as long, and a smooth change between.
    """
    chosen = {**ROPE_DEFAULTS, **kwargs}
    waves_in_context = chosen["original_max_position_embeddings"] * freqs / (2 * math.pi)
    low, high = chosen["low_freq_factor"], chosen["high_freq_factor"]
    kept = ((waves_in_context - low) / (high - low)).clamp(0.0, 1.0)
    return (kept + (1 - kept) / chosen["factor"]) * freqs


def precompute_freqs_cis(
    dim: int,
    end: int,
    theta: float = 10000.0,
    use_scaled: bool = False,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Tensor:
    """The angle of each pair of elements at each position.

    Args:
        dim: length of a head's vectors.
        end: number of positions.
        theta: base of the frequencies.
        use_scaled: stretch them by `apply_scaling`.
        device: device of the result.
        **kwargs: for `apply_scaling`.

    Returns:
        Radians, `[end, dim/2]` float32.
    """
    exponents = torch.arange(0, dim, 2, device=device)[: dim // 2].float() / dim
    freqs = 1.0 / (theta**exponents)
    if use_scaled:
        freqs = apply_scaling(freqs, **kwargs)
    return torch.outer(torch.arange(end, device=freqs.device, dtype=torch.float32), freqs)


def apply_rotary_polar_compatible(query: Tensor, key: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each pair (2i, 2i + 1) of queries and keys by its position's angle, as a product of complex numbers.

    Args:
        query: `[batch, seq, heads, head]`.
        key: as `query`, with as many heads as there are.
        freqs_cis: radians, `[batch, seq, head/2]` float32.

    Returns:
        Both, in their own dtypes.

    Raises:
        ValueError: angles of another dtype, which would be too coarse.
    """
    if freqs_cis.dtype != torch.float32:
        raise ValueError(
            f"freqs_cis is {freqs_cis.dtype}; expected torch.float32, which keeps the angles of far positions exact"
        )
    cos, sin = freqs_cis.cos().unsqueeze(2), freqs_cis.sin().unsqueeze(2)

    def rotated(vectors: Tensor) -> Tensor:
        real, imaginary = vectors[..., ::2], vectors[..., 1::2]
        pairs = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
        return pairs.flatten(-2).type_as(vectors)

    return rotated(query), rotated(key)
