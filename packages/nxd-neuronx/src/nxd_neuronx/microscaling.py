"""Weights in 4- and 8-bit floats of the OCP microscaling format: apart, together, and as ordinary floats.

Two values are in a byte, the first in its low half; 32 values in a row share a scale, a power of two with a bias of
127. Files of such models can be read with this; the layouts that only NKI kernels compute on are not here.
"""

import torch
from torch import Tensor

# Values of a 4-bit number: sign, two bits of exponent, one of mantissa.
FP4_VALUES = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]

_SCALE_BIAS = 127
_ANY_ROWS = 16384 * 512  # the old default of `rows_per_chunk`, which has no effect here


def split_byte_4bit_tensor(tensor: Tensor, *, rows_per_chunk: int = _ANY_ROWS) -> Tensor:
    """The halves of bytes.

    Args:
        tensor: `[..., n]`, of one byte each.
        rows_per_chunk: accepted without effect, as in the other functions of this file.

    Returns:
        uint8 `[..., 2 * n]`, each below 16.
    """
    packed = tensor.view(torch.uint8)
    return torch.stack((packed & 0x0F, packed >> 4), -1).flatten(-2)


def pack_byte_4bit_tensor(tensor: Tensor, *, rows_per_chunk: int = _ANY_ROWS) -> Tensor:
    """The inverse of `split_byte_4bit_tensor`.

    Raises:
        ValueError: not uint8, or an odd number of values in a row.
    """
    if tensor.dtype != torch.uint8 or tensor.shape[-1] % 2 or not tensor.shape[-1]:
        raise ValueError(f"{tensor.dtype} {list(tensor.shape)} cannot be packed; pass uint8 in rows of even length")
    pairs = tensor.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def pack_fp4_x4_uint16(X: Tensor) -> Tensor:  # noqa: N803  (the documented name)
    """Two bytes as one number: uint8 `[..., 2 * n]` to uint16 `[..., n]`, the same memory.

    Raises:
        ValueError: not uint8, or an odd number of bytes in a row.
    """
    if X.dtype != torch.uint8 or X.shape[-1] % 2:
        raise ValueError(f"{X.dtype} {list(X.shape)} cannot be packed; pass uint8 in rows of even length")
    return X.view(torch.uint16)


def apply_lut_byte_4bit_tensor(
    blocks: Tensor, *, rows_per_chunk: int = _ANY_ROWS, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of 4-bit floats, without scales: uint8 `[..., blocks, n]`, each below 16, to `[..., blocks * n]`."""
    return _values(blocks, dtype).flatten(-2)


def dequant_byte_4bit_tensor(blocks: Tensor, scales: Tensor, *, rows_per_chunk: int = _ANY_ROWS) -> Tensor:
    """The values of 4-bit floats: uint8 `[..., blocks, n]`, each below 16, to bfloat16 `[..., blocks * n]`.

    Args:
        blocks: as above.
        scales: uint8 `[..., blocks]`.
        rows_per_chunk: accepted without effect.

    Raises:
        ValueError: shapes do not fit.
    """
    return _scaled(blocks, scales, torch.bfloat16).flatten(-2)


def get_mxfp4_tensor(
    blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16, rows_per_chunk: int = _ANY_ROWS
) -> Tensor:
    """The values of packed 4-bit floats.

    Args:
        blocks: uint8 `[..., blocks, n]`, two values in each.
        scales: uint8 `[..., blocks]`.
        dtype: dtype of the result.
        rows_per_chunk: accepted without effect.

    Returns:
        `[..., blocks * 2 * n]`.

    Raises:
        ValueError: shapes do not fit.
    """
    return _scaled(split_byte_4bit_tensor(blocks), scales, dtype).flatten(-2)


def get_mxfp4_tensor_from_uint16(
    blocks: Tensor,
    scales: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rows_per_chunk: int = _ANY_ROWS,
    output_quad_row: bool = False,
) -> Tensor:
    """`get_mxfp4_tensor` of uint16 `[..., blocks, n]`, four values in each.

    Args:
        blocks: as above.
        scales: uint8 `[..., blocks]`.
        dtype: dtype of the result.
        rows_per_chunk: accepted without effect.
        output_quad_row: give `[..., blocks * n, 4]`.

    Returns:
        `[..., blocks * 4 * n]`.

    Raises:
        ValueError: shapes do not fit.
    """
    values = get_mxfp4_tensor(blocks.view(torch.uint8), scales, dtype=dtype)
    return values.unflatten(-1, (-1, 4)) if output_quad_row else values


def get_mxfp8_tensor_from_uint32(
    blocks: Tensor,
    scales: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    rows_per_chunk: int = _ANY_ROWS,
    output_quad_row: bool = False,
    replace_nan_with_zeros: bool = False,
) -> Tensor:
    """The values of packed 8-bit floats.

    Args:
        blocks: uint32 `[..., blocks, n]`, four values in each.
        scales: uint8 `[..., blocks]`.
        dtype: dtype of the result.
        fp8_dtype: which 8-bit floats they are.
        rows_per_chunk: accepted without effect.
        output_quad_row: give `[..., blocks * n, 4]`.
        replace_nan_with_zeros: for bits that are no number.

    Returns:
        `[..., blocks * 4 * n]`.

    Raises:
        ValueError: shapes do not fit.
    """
    values = _times_scale(blocks.contiguous().view(fp8_dtype).to(dtype), scales, dtype).flatten(-2)
    if replace_nan_with_zeros:
        values = values.nan_to_num(nan=0.0)
    return values.unflatten(-1, (-1, 4)) if output_quad_row else values


def split_gate_up(W_gate_up: Tensor, scale_gate_up: Tensor, bias_gate_up: Tensor) -> tuple[Tensor, ...]:  # noqa: N803
    """Gate and up projections whose rows are in turns, apart.

    Args:
        W_gate_up: `[experts, 2 * intermediate, blocks, n]`.
        scale_gate_up: `[experts, 2 * intermediate, blocks]`.
        bias_gate_up: `[experts, 2 * intermediate]`.

    Returns:
        Weight, scale and bias of gate, then of up, each with `intermediate` rows.
    """
    together = (W_gate_up, scale_gate_up, bias_gate_up)
    return tuple(tensor[:, first::2].contiguous() for first in (0, 1) for tensor in together)


def _scaled(halves: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return _times_scale(_values(halves, dtype), scales, dtype)


def _times_scale(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    if values.shape[:-1] != scales.shape:
        raise ValueError(
            f"scales of shape {list(scales.shape)} do not match the blocks; expected {list(values.shape[:-1])}"
        )
    return torch.ldexp(values, scales.unsqueeze(-1).int() - _SCALE_BIAS).to(dtype)


def _values(halves: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(FP4_VALUES, dtype=dtype, device=halves.device)[halves.int()]
