"""Weights in the 4-bit floats of the OCP microscaling format: packing, unpacking, and conversion to ordinary floats.

A byte holds two values, the first in its low half; 32 values in a row share a scale, a power of two with a bias of 127.
The layouts that only NKI kernels compute on are not implemented.
"""

import torch
from torch import Tensor

# The 16 values of a 4-bit float: sign, two bits of exponent, one of mantissa.
FP4_VALUES = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]

_SCALE_BIAS = 127
_ANY_ROWS = 16384 * 512  # upstream's default of `rows_per_chunk`


def split_byte_4bit_tensor(tensor: Tensor, *, rows_per_chunk: int = _ANY_ROWS) -> Tensor:
    """Return the halves of bytes: `[..., n]` of one-byte elements to uint8 `[..., 2 * n]`, each below 16.

    `rows_per_chunk` is accepted without effect, here and in the other functions of this file.
    """
    packed = tensor.view(torch.uint8)
    return torch.stack((packed & 0x0F, packed >> 4), -1).flatten(-2)


def pack_byte_4bit_tensor(tensor: Tensor, *, rows_per_chunk: int = _ANY_ROWS) -> Tensor:
    """Invert `split_byte_4bit_tensor`.

    Raises:
        ValueError: not uint8, or an odd number of values in a row.
    """
    if tensor.dtype != torch.uint8 or tensor.shape[-1] % 2 or not tensor.shape[-1]:
        raise ValueError(f"{tensor.dtype} {list(tensor.shape)} cannot be packed; pass uint8 in rows of even length")
    pairs = tensor.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def pack_fp4_x4_uint16(X: Tensor) -> Tensor:  # noqa: N803  (the documented name)
    """View two bytes as one number: uint8 `[..., 2 * n]` to uint16 `[..., n]`, the same memory.

    Raises:
        ValueError: not uint8, or an odd number of bytes in a row.
    """
    if X.dtype != torch.uint8 or X.shape[-1] % 2:
        raise ValueError(f"{X.dtype} {list(X.shape)} cannot be packed; pass uint8 in rows of even length")
    return X.view(torch.uint16)


def apply_lut_byte_4bit_tensor(
    blocks: Tensor, *, rows_per_chunk: int = _ANY_ROWS, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return unscaled values of 4-bit floats: uint8 `[..., blocks, n]`, each below 16, to `[..., blocks * n]`."""
    return _values(blocks, dtype).flatten(-2)


def get_mxfp4_tensor(
    blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16, rows_per_chunk: int = _ANY_ROWS
) -> Tensor:
    """Return the values of packed 4-bit floats, `[..., blocks * 2 * n]`.

    Args:
        blocks: uint8 `[..., blocks, n]`, two values in each.
        scales: uint8 `[..., blocks]`.
        dtype: dtype of the result.
        rows_per_chunk: accepted without effect.

    Raises:
        ValueError: the shapes do not match.
    """
    values = _values(split_byte_4bit_tensor(blocks), dtype)
    if values.shape[:-1] != scales.shape:
        raise ValueError(
            f"scales of shape {list(scales.shape)} do not match the blocks; expected {list(values.shape[:-1])}"
        )
    return torch.ldexp(values, scales.unsqueeze(-1).int() - _SCALE_BIAS).to(dtype).flatten(-2)


def get_mxfp4_tensor_from_uint16(
    blocks: Tensor,
    scales: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rows_per_chunk: int = _ANY_ROWS,
    output_quad_row: bool = False,
) -> Tensor:
    """`get_mxfp4_tensor` of uint16 `[..., blocks, n]`, four values in each.

    Returns `[..., blocks * 4 * n]`, or `[..., blocks * n, 4]` with `output_quad_row`.
    """
    values = get_mxfp4_tensor(blocks.view(torch.uint8), scales, dtype=dtype)
    return values.unflatten(-1, (-1, 4)) if output_quad_row else values


def _values(halves: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(FP4_VALUES, dtype=dtype, device=halves.device)[halves.int()]
