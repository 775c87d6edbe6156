"""Quantized tensors, small integers or fp8 values times a scale, and the names of the quantization types.

All types are symmetric: zero stays zero, and `value = quantized * scale`. There is one scale for the whole tensor,
`[1]`, or for each index along one dim, such as `[out, 1]`. Scales are float32.
"""

import enum
import warnings
from collections.abc import Sequence
from enum import Enum
from typing import TypedDict

import torch
from nxd_state import Group, all_reduce
from torch import Tensor, nn

_LEAST_SCALE = 1e-5  # for fp8; the scale of a channel of zeros
_LEAST_INT8_SCALE = torch.finfo(torch.float32).eps


class _ContainsValues(enum.EnumMeta):
    """`value in SomeEnum` is also true for the values of members."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class QuantizationType(Enum, metaclass=_ContainsValues):
    """The parts of a tensor that have their own scales."""

    PER_TENSOR_SYMMETRIC = "per_tensor_symmetric"
    PER_CHANNEL_SYMMETRIC = "per_channel_symmetric"
    PER_KEY_SYMMETRIC = "per_key_symmetric"
    BLOCKWISE_SYMMETRIC = "blockwise_symmetric"
    EXPERT_WISE_PER_CHANNEL_SYMMETRIC = "expert_wise_per_channel_symmetric"


class ActivationQuantizationType(Enum, metaclass=_ContainsValues):
    """Whether a layer's input is quantized as well, with a dynamic or a fixed scale."""

    DYNAMIC = "dynamic"
    STATIC = "static"
    NONE = None


class _NamedDtype(Enum, metaclass=_ContainsValues):
    """Dtypes with their own names."""

    @classmethod
    def has_dtype(cls, dtype_string: str) -> None:
        """Raise ValueError for an unknown name, in any case."""
        if dtype_string.upper() not in cls.__members__:
            names = ", ".join(cls.__members__)
            raise ValueError(f"{dtype_string} is not a valid {cls.__name__}; use one of {names}")

    @classmethod
    def get_dtype(cls, dtype_string: str) -> torch.dtype:
        """The dtype of a name, in any case."""
        cls.has_dtype(dtype_string)
        dtype: torch.dtype = cls[dtype_string.upper()].value
        return dtype


class QuantizedDtype(_NamedDtype):
    """Dtypes of quantized values. The packed ones, four values per word, are for NKI kernels only."""

    INT8 = torch.int8
    F8E4M3 = torch.float8_e4m3fn
    F8E4M3FN = torch.float8_e4m3fn
    F8E5M2 = torch.float8_e5m2
    F4E2M1FN_X4 = torch.uint16
    F8E4M3FN_X4 = torch.uint32
    F8E5M2_X4 = torch.uint32

    def is_float(self) -> bool:
        """Whether values are floating-point numbers."""
        return self is not QuantizedDtype.INT8

    def get_packed_count(self) -> int:
        """Number of values per element."""
        return 4 if self.value in (torch.uint16, torch.uint32) else 1


class ScaleDtype(_NamedDtype):
    """Dtypes of scales; F8E8M0 is an exponent of two, for NKI kernels."""

    F32 = torch.float32
    F8E8M0 = torch.uint8

    def get_default_scale(self) -> float:
        """The scale that leaves values unchanged."""
        return 127 if self is ScaleDtype.F8E8M0 else 1.0


class DtypeBound(Enum):
    """The largest and smallest values used of each dtype; for fp8 e4m3 they are those of Trainium's variant."""

    F8E4M3_MAX = 240.0
    F8E4M3_MIN = -240.0
    INT8_MAX = 127
    INT8_MIN = -128
    F8E4M3FN_MAX = torch.finfo(torch.float8_e4m3fn).max
    F8E4M3FN_MIN = torch.finfo(torch.float8_e4m3fn).min
    F8E5M2_MAX = torch.finfo(torch.float8_e5m2).max
    F8E5M2_MIN = torch.finfo(torch.float8_e5m2).min
    BFLOAT16_MAX = torch.finfo(torch.bfloat16).max
    BFLOAT16_MIN = torch.finfo(torch.bfloat16).min
    FLOAT16_MAX = torch.finfo(torch.float16).max
    FLOAT16_MIN = torch.finfo(torch.float16).min

    @staticmethod
    def from_torch_dtype(dtype: torch.dtype) -> tuple[float, float]:
        """Largest and smallest value used of a dtype.

        Raises:
            ValueError: the dtype is not one for quantized values.
        """
        names = {
            torch.float8_e4m3fn: "F8E4M3",
            torch.float8_e5m2: "F8E5M2",
            torch.int8: "INT8",
            torch.bfloat16: "BFLOAT16",
            torch.float16: "FLOAT16",
        }
        if dtype not in names:
            raise ValueError(f"Unsupported dtype: {dtype}; use one of {', '.join(map(str, names))}")
        return DtypeBound[f"{names[dtype]}_MAX"].value, DtypeBound[f"{names[dtype]}_MIN"].value


class QuantizationConfig(TypedDict, total=False):
    """How a model's layers are quantized.

    `quantization_per_channel_axis` is 0, the outputs; None means the same. `clamp_bound` bounds the values that
    determine the scale of an input. `block_axis` and `block_size` are for `BLOCKWISE_SYMMETRIC`.
    """

    quantization_type: QuantizationType
    quantized_dtype: QuantizedDtype
    activation_quantization_type: ActivationQuantizationType
    clamp_bound: float
    quantization_per_channel_axis: int | None
    block_axis: list[int] | None
    block_size: list[int] | None
    scale_dtype: ScaleDtype


def default_config(quantization_type: QuantizationType = QuantizationType.PER_TENSOR_SYMMETRIC) -> QuantizationConfig:
    """The config of a quantization type: int8 per tensor or channel, fp8 for the others; inputs are not quantized."""
    is_int8 = quantization_type in (QuantizationType.PER_TENSOR_SYMMETRIC, QuantizationType.PER_CHANNEL_SYMMETRIC)
    config = QuantizationConfig(
        quantization_type=quantization_type,
        quantized_dtype=QuantizedDtype.INT8 if is_int8 else QuantizedDtype.F8E4M3,
        activation_quantization_type=ActivationQuantizationType.NONE,
        clamp_bound=float("inf"),
    )
    if quantization_type is QuantizationType.BLOCKWISE_SYMMETRIC:
        return {**config, "block_axis": None, "block_size": None, "scale_dtype": ScaleDtype.F32}
    if quantization_type is not QuantizationType.PER_TENSOR_SYMMETRIC:
        config["quantization_per_channel_axis"] = None
    return config


@torch.no_grad()
def quantize(
    tensor: Tensor,
    dtype: torch.dtype,
    *,
    channel_axis: int | None = None,
    clamp_bound: float = float("inf"),
    group: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize a tensor to values of a small dtype and their scale.

    Args:
        tensor: any shape and float dtype.
        dtype: torch.int8, torch.float8_e4m3fn or torch.float8_e5m2.
        channel_axis: the dim that has one scale per index; one scale for the tensor if None.
        clamp_bound: bound of the values; larger ones are clamped.
        group: the ranks whose parts share a scale; all of them call this.

    Returns:
        Values of the tensor's shape, and the scale in float32: `[1]`, or with length 1 in all dims but `channel_axis`.

    Raises:
        ValueError: another dtype.
    """
    largest, smallest = DtypeBound.from_torch_dtype(dtype)
    wide = tensor.detach().to(torch.float32)
    if channel_axis is None:
        reached = wide.abs().amax().reshape(1)
    else:
        others = [dim for dim in range(wide.dim()) if dim != channel_axis % wide.dim()]
        reached = wide.abs().amax(dim=others, keepdim=True)
    if group is not None and group.size > 1:
        reached = all_reduce(reached, group, op="max")
    reached = reached.clamp(max=clamp_bound)
    if dtype == torch.int8:
        # Torch's observers divide by half of the range for a tensor, by the largest value for a channel.
        scale = (reached / (127.5 if channel_axis is None else 127.0)).clamp(min=_LEAST_INT8_SCALE)
        return (wide / scale).round().clamp(smallest, largest).to(dtype), scale
    scale = (reached / largest).clamp(min=_LEAST_SCALE)
    return (wide / scale).clamp(smallest, largest).to(dtype), scale


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values times their scale, which is broadcast, computed in float32 and converted to `dtype`."""
    return (values.to(torch.float32) * scale).to(dtype)


@torch.no_grad()
def quantize_fp8_blocks(weight: Tensor, block_size: int = 128) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to fp8 with one scale per square block, as the checkpoints of DeepSeek-V3 hold it.

    Computed in float32, `block_size` rows at a time.

    Args:
        weight: `[out, in]`, any float dtype.
        block_size: rows and columns of a block; the last ones may be smaller.

    Returns:
        Values in float8_e4m3fn, of the weight's shape, and the scales by which they are to be multiplied, in float32,
        `[ceil(out / block_size), ceil(in / block_size)]`. A block of zeros has the scale 1.
    """
    largest = torch.finfo(torch.float8_e4m3fn).max
    num_rows, num_columns = weight.shape
    num_blocks = -(-num_columns // block_size)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(-(-num_rows // block_size), num_blocks, dtype=torch.float32, device=weight.device)
    for row, scale in zip(range(0, num_rows, block_size), scales, strict=True):
        wide = weight[row : row + block_size].to(torch.float32)
        padded = nn.functional.pad(wide, (0, num_blocks * block_size - num_columns))
        reached = padded.unflatten(1, (num_blocks, block_size)).abs().amax(dim=(0, 2))
        scale.copy_(torch.where(reached == 0, 1.0, (reached / largest).clamp(min=torch.finfo(torch.float32).tiny)))
        scaled = wide / scale.repeat_interleave(block_size)[:num_columns]
        values[row : row + block_size] = scaled.clamp_(-largest, largest).to(torch.float8_e4m3fn)
    return values, scales


def broadcastable_block_shapes(
    tensor_shape: Sequence[int], scale_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the view shapes in which a scale per block broadcasts against a tensor.

    Args:
        tensor_shape: shape of the values.
        scale_shape: shape of the scales: at most as many dims, each the number of blocks along the tensor's dim.

    Returns:
        A shape for each: a dim with blocks becomes two, their number and their length (1 in the scale).

    Raises:
        ValueError: the shapes do not fit, or no dim has blocks.
    """
    scales = [*scale_shape, *[1] * (len(tensor_shape) - len(scale_shape))]
    fits = len(scale_shape) <= len(tensor_shape) and all(
        count <= size and size % count == 0 for size, count in zip(tensor_shape, scales, strict=True)
    )
    if not fits or list(tensor_shape) == scales:
        raise ValueError(
            f"scales of shape {list(scale_shape)} do not lie on blocks of {list(tensor_shape)}; each of their dims "
            "must divide the tensor's, and one be shorter"
        )
    tensor_view, scale_view = [], []
    for size, count in zip(tensor_shape, scales, strict=True):
        is_split = count not in (1, size)
        tensor_view += [count, size // count] if is_split else [size]
        scale_view += [count, 1] if is_split else [count]
    return tuple(tensor_view), tuple(scale_view)


def blockwise_dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values times the scale of their block, computed in float32.

    Args:
        values: any shape, int8 or fp8.
        scale: see `broadcastable_block_shapes`; uint8 scales are exponents of two, counted from -127.
        dtype: dtype of the result.

    Raises:
        ValueError: shapes do not fit, or values are packed.
    """
    if values.dtype in (torch.uint16, torch.uint32):
        raise ValueError(f"{values.dtype} holds packed values, which only NKI kernels read; use int8 or fp8 values")
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.to(torch.float32) - 127)
    values_view, scale_view = broadcastable_block_shapes(values.shape, scale.shape)
    return dequantize(values.reshape(values_view), scale.reshape(scale_view), dtype).reshape(values.shape)


def quantize_to_qint8(tensor: Tensor, channel_axis: int | None = None) -> Tensor:
    """Quantize a float32 tensor to torch's own quantized tensor, which has its scale; see `quantize`."""
    _, scale = quantize(tensor, torch.int8, channel_axis=channel_axis)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deprecated", category=UserWarning)  # that torch will drop them
        if channel_axis is None:
            return torch.quantize_per_tensor(tensor.float(), float(scale), 0, torch.qint8)
        scales = scale.flatten().double()
        zeros = torch.zeros_like(scales, dtype=torch.int64)
        return torch.quantize_per_channel(tensor.float(), scales, zeros, channel_axis, torch.qint8)


def extract_q_scale(q_tensor: Tensor) -> Tensor:
    """The scale of torch's quantized tensor, in float32: `[1]`, or with length 1 in all dims but the channels'.

    Raises:
        ValueError: the scheme is neither per tensor nor per channel.
    """
    if q_tensor.qscheme() == torch.per_tensor_affine:
        return torch.tensor([q_tensor.q_scale()])
    if q_tensor.qscheme() != torch.per_channel_affine:
        raise ValueError(f"qscheme: {q_tensor.qscheme()} is not supported; quantize per tensor or per channel")
    shape = [1] * q_tensor.dim()
    shape[q_tensor.q_per_channel_axis()] = -1
    return q_tensor.q_per_channel_scales().to(torch.float32).view(shape)
