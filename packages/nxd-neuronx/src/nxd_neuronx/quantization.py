"""Quantization under the names that scripts import, over nxd_layers.quantization."""

from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from nxd_layers.quantization import (
    DtypeBound,
    QuantizationType,
    blockwise_dequantize,
    dequantize,
    extract_q_scale,
    quantize,
    quantize_linears,
    quantize_to_qint8,
)
from torch import Tensor, nn

from nxd_neuronx.microscaling import apply_lut_byte_4bit_tensor, split_byte_4bit_tensor

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PACKED = "_packed_params._packed_params"

quantize_pytorch_model_per_channel_symmetric = partial(quantize_linears, per_channel=True)
quantize_per_tensor_symmetric = partial(quantize_to_qint8, channel_axis=None)


def quantize_pytorch_model_per_tensor_symmetric(
    float_model: nn.Module, inplace: bool = False, dtype: torch.dtype = torch.qint8
) -> nn.Module:
    """`quantize_linears` with one scale for each weight."""
    return quantize_linears(float_model, inplace, dtype, per_channel=False)


def quantize_per_channel_symmetric(tensor: Tensor, channel_axis: int) -> Tensor:
    """A tensor as torch's own quantized tensor, with a scale for each index along a dim."""
    return quantize_to_qint8(tensor, channel_axis)


def quantize_fp8_per_channel(
    tensor: Tensor, dtype: torch.dtype, channel_axis: int, clamp_bound: float = float("inf")
) -> tuple[Tensor, Tensor]:
    """A tensor as fp8 values and a scale for each index along a dim; see `nxd_layers.quantization.quantize`.

    Raises:
        ValueError: `dtype` is not fp8.
    """
    _check_fp8(dtype)
    return quantize(tensor, dtype, channel_axis=channel_axis, clamp_bound=clamp_bound)


def _check_fp8(dtype: torch.dtype) -> None:
    if dtype not in _FP8:
        raise ValueError(f"dtype={dtype} is not fp8; use {' or '.join(map(str, _FP8))}")


def quantize_static_quant_activations(input: Tensor, input_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """An input divided by a fixed scale, in a small dtype.

    Raises:
        ValueError: nothing is quantized to `dtype`.
    """
    largest, smallest = DtypeBound.from_torch_dtype(dtype)
    scaled = (input / input_scale).clamp(smallest, largest)
    return scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def direct_cast_dequantize(tensor: Tensor, upcast_dtype: torch.dtype) -> Tensor:
    """The tensor in a wider dtype, without a scale."""
    return tensor.to(upcast_dtype)


def scale_dequantize(tensor: Tensor, scale: Tensor, upcast_dtype: torch.dtype) -> Tensor:
    """Values times a scale that has one dim less than they have.

    Args:
        tensor: `[batch, seq, out]`, say.
        scale: `[1, out]`; a dim is put before its last.
        upcast_dtype: dtype of the result.
    """
    return dequantize(tensor, scale.unsqueeze(scale.dim() - 1), upcast_dtype)


def blockwise_scale_dequantize(
    tensor: Tensor, scale: Tensor, upcast_dtype: torch.dtype, mx_swizzle: bool = False
) -> Tensor:
    """Values times the scale of their block.

    Args:
        tensor: any shape, int8 or fp8; or uint16, with four 4-bit floats in each.
        scale: the number of blocks along each dim.
        upcast_dtype: dtype of the result.
        mx_swizzle: False.

    Raises:
        ValueError: shapes do not fit, or the layout is one of NKI kernels.
    """
    if mx_swizzle:
        raise ValueError("mx_swizzle=True is a layout that only NKI kernels read; pass the values unswizzled")
    if tensor.dtype == torch.uint16:
        tensor = apply_lut_byte_4bit_tensor(split_byte_4bit_tensor(tensor.contiguous()).unsqueeze(-1))
    return blockwise_dequantize(tensor, scale, upcast_dtype)


class KVQuantizationConfig:
    """How keys and values are kept in a cache.

    Args:
        **kwargs: `k_quant_method` and `v_quant_method` (per tensor), `quant_dtype` (float8_e4m3fn) and `direct_cast`
            (True: without scales).

    Raises:
        ValueError: `direct_cast` with another way than per tensor.
    """

    def __init__(self, **kwargs: Any) -> None:
        per_tensor = QuantizationType.PER_TENSOR_SYMMETRIC
        self.k_quant_method = kwargs.pop("k_quant_method", per_tensor)
        self.v_quant_method = kwargs.pop("v_quant_method", per_tensor)
        self.quant_dtype = kwargs.pop("quant_dtype", torch.float8_e4m3fn)
        self.direct_cast = kwargs.pop("direct_cast", True)
        if self.direct_cast and {self.k_quant_method, self.v_quant_method} != {per_tensor}:
            raise ValueError("direct_cast=True has no scales, so both methods must be PER_TENSOR_SYMMETRIC")


class PerChannelAbsMaxObserver(nn.Module):
    """Watches tensors for the largest absolute value of each channel.

    Args:
        ch_axis: the channels' dim.
        dtype: torch.qint8.
        qscheme: torch.per_channel_symmetric.
        **options: options of torch's observers; accepted without effect.

    Attributes:
        max_val: `[channels, 1]`; empty before the first tensor.

    Raises:
        ValueError: another dtype.
    """

    max_val: Tensor

    def __init__(
        self,
        ch_axis: int = 0,
        dtype: torch.dtype = torch.qint8,
        qscheme: torch.qscheme = torch.per_channel_symmetric,
        **options: Any,
    ) -> None:
        super().__init__()
        if dtype != torch.qint8:
            raise ValueError(f"dtype={dtype}: only torch.qint8 is supported")
        self.ch_axis = ch_axis
        self.register_buffer("max_val", torch.tensor([]))

    @classmethod
    def with_args(cls, **arguments: Any) -> Any:
        """A function that makes observers with these arguments."""
        return partial(cls, **arguments)

    def forward(self, x_orig: Tensor) -> Tensor:
        """Watch a tensor; returns it."""
        if x_orig.numel():
            reached = x_orig.detach().movedim(self.ch_axis, 0).flatten(1).abs().amax(dim=1, keepdim=True)
            reached = reached.to(self.max_val.dtype)
            self.max_val = torch.maximum(reached, self.max_val) if self.max_val.numel() else reached
        return x_orig

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scales, and zero points, which are 0: `[channels]` each."""
        scales = (self.max_val.squeeze(1) / 127.0).clamp(min=torch.finfo(torch.float32).eps)
        return scales, torch.zeros_like(scales, dtype=torch.int64)

    def reset_min_max_vals(self) -> None:
        """Begin again."""
        self.max_val = torch.tensor([])


class QuantizedParallelLinearLayerStateDictAdaptor:
    """Reads a quantized layer's tensors from a state, also from one in which torch packed them."""

    @staticmethod
    def get_weight_from_state_dict(prefix: str, state_dict: Mapping[str, Any]) -> Tensor:
        """The values.

        Raises:
            RuntimeError: there are none.
        """
        if f"{prefix}weight" in state_dict:
            return state_dict[f"{prefix}weight"]
        return torch.int_repr(_packed(prefix, state_dict, "weight")[0])

    @staticmethod
    def set_weight_to_state_dict(prefix: str, tensor: Tensor, state_dict: MutableMapping[str, Any]) -> None:
        """Put other values in their place.

        Raises:
            RuntimeError: there are none.
        """
        if f"{prefix}weight" in state_dict:
            state_dict[f"{prefix}weight"] = tensor
        else:
            packed = _packed(prefix, state_dict, "weight")
            state_dict[prefix + _PACKED] = (tensor, *packed[1:])

    @staticmethod
    def get_bias_from_state_dict(prefix: str, state_dict: Mapping[str, Any]) -> Tensor | None:
        """The bias, or None."""
        if f"{prefix}bias" in state_dict:
            return state_dict[f"{prefix}bias"]
        bias = (*state_dict.get(prefix + _PACKED, ()), None, None)[1]
        return bias.detach() if isinstance(bias, Tensor) else None

    @staticmethod
    def get_scale_from_state_dict(prefix: str, state_dict: Mapping[str, Any]) -> Tensor:
        """The scale.

        Raises:
            RuntimeError: the tensor is missing.
        """
        if prefix + _PACKED in state_dict:
            return extract_q_scale(state_dict[prefix + _PACKED][0])
        return _named(prefix, state_dict, "scale")

    @staticmethod
    def get_input_scale_from_state_dict(prefix: str, state_dict: Mapping[str, Any]) -> Tensor:
        """The scale of inputs.

        Raises:
            RuntimeError: the tensor is missing.
        """
        return _named(prefix, state_dict, "input_scale")


def _packed(prefix: str, state_dict: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    if prefix + _PACKED not in state_dict:
        raise RuntimeError(f"Cannot find {prefix}{name} in the state_dict; quantize the checkpoint first")
    return tuple(state_dict[prefix + _PACKED])


def _named(prefix: str, state_dict: Mapping[str, Any], name: str) -> Tensor:
    if prefix + name not in state_dict:
        raise RuntimeError(f"Cannot find {prefix}{name} in state_dict; quantize the checkpoint first")
    tensor: Tensor = state_dict[prefix + name]
    return tensor
