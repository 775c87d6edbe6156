"""Quantized layers, models and tensors under the names of NeuronX Distributed, over nxd_layers.quantization."""

from abc import ABCMeta
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import nxd_layers
import torch
from nxd_layers import quantization
from nxd_layers.quantization import (
    ActivationQuantizationType,
    DtypeBound,
    QuantizationConfig,
    QuantizationType,
    QuantizedDtype,
    blockwise_dequantize,
    dequantize,
    quantize_linears,
)
from torch import Tensor, nn

from nxd_neuronx.microscaling import apply_lut_byte_4bit_tensor, split_byte_4bit_tensor

quantize_pytorch_model_per_channel_symmetric = partial(quantize_linears, per_channel=True)


def quantize_pytorch_model_per_tensor_symmetric(
    float_model: nn.Module, inplace: bool = False, dtype: torch.dtype = torch.qint8
) -> nn.Module:
    """`quantize_linears` with one scale per weight."""
    return quantize_linears(float_model, inplace, dtype, per_channel=False)


def quantize_static_quant_activations(input: Tensor, input_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize an input with a fixed scale.

    Raises:
        ValueError: `dtype` is not a quantized dtype.
    """
    largest, smallest = DtypeBound.from_torch_dtype(dtype)
    scaled = (input / input_scale).clamp(smallest, largest)
    return scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def direct_cast_dequantize(tensor: Tensor, upcast_dtype: torch.dtype) -> Tensor:
    """Cast the tensor to a wider dtype, without a scale."""
    return tensor.to(upcast_dtype)


def scale_dequantize(tensor: Tensor, scale: Tensor, upcast_dtype: torch.dtype) -> Tensor:
    """Multiply values, such as `[batch, seq, out]`, by a scale with one dim less, `[1, out]`."""
    return dequantize(tensor, scale.unsqueeze(scale.dim() - 1), upcast_dtype)


def blockwise_scale_dequantize(
    tensor: Tensor, scale: Tensor, upcast_dtype: torch.dtype, mx_swizzle: bool = False
) -> Tensor:
    """Multiply values by the scale of their block.

    Args:
        tensor: int8 or fp8 values of any shape; or uint16, each with four 4-bit floats.
        scale: scales; the length of each dim is the number of blocks.
        upcast_dtype: dtype of the result.
        mx_swizzle: must be False.

    Raises:
        ValueError: the shapes do not match, or `mx_swizzle` is True.
    """
    if mx_swizzle:
        raise ValueError("mx_swizzle=True is a layout that only NKI kernels read; pass the values unswizzled")
    if tensor.dtype == torch.uint16:
        tensor = apply_lut_byte_4bit_tensor(split_byte_4bit_tensor(tensor.contiguous()).unsqueeze(-1))
    return blockwise_dequantize(tensor, scale, upcast_dtype)


class KVQuantizationConfig:
    """How keys and values are quantized in a cache.

    Args:
        **kwargs: `k_quant_method` and `v_quant_method` (default: per tensor), `quant_dtype` (default: float8_e4m3fn)
            and `direct_cast` (default: True, without scales).

    Raises:
        ValueError: `direct_cast` with a method other than per tensor.
    """

    def __init__(self, **kwargs: Any) -> None:
        per_tensor = QuantizationType.PER_TENSOR_SYMMETRIC
        self.k_quant_method = kwargs.pop("k_quant_method", per_tensor)
        self.v_quant_method = kwargs.pop("v_quant_method", per_tensor)
        self.quant_dtype = kwargs.pop("quant_dtype", torch.float8_e4m3fn)
        self.direct_cast = kwargs.pop("direct_cast", True)
        if self.direct_cast and {self.k_quant_method, self.v_quant_method} != {per_tensor}:
            raise ValueError("direct_cast=True has no scales, so both methods must be PER_TENSOR_SYMMETRIC")


class BaseQuantizeParallelLinear(nn.Module, metaclass=ABCMeta):
    """Base class of every parallel layer with a quantized weight."""


class QuantizedColumnParallel(nxd_layers.ColumnParallelLinear):
    """`nxd_layers.ColumnParallelLinear` with a quantized weight, zero until a state dict or `from_float` fills it.

    Args beyond those of `ColumnParallelLinear`:
        quantization_type: per tensor or per channel, as a name or member.
        quantized_dtype: dtype of the weight's values.
        dtype: dtype of the bias.
        quantization_per_channel_axis: 0 or None: one scale per output.
        activation_quantization_type: must be None: inputs are not quantized.
        keep_master_weight: accepted without effect, like `block_axis`, `block_size`, `scale_dtype` and `clamp_bound`.

    Raises:
        ValueError: an unsupported way of quantizing, or sizes that do not divide.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        quantization_type: QuantizationType | str = "per_tensor_symmetric",
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        quantized_dtype: QuantizedDtype | torch.dtype = QuantizedDtype.INT8,
        device: torch.device | str | None = None,
        stride: int = 1,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        quantization_per_channel_axis: int | None = None,
        block_axis: list[int] | None = None,
        block_size: list[int] | None = None,
        scale_dtype: Any = torch.float32,
        tensor_model_parallel_group: Any = None,
        pad: bool = False,
        activation_quantization_type: ActivationQuantizationType | str | None = None,
        clamp_bound: float = float("inf"),
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias,
            gather_output,
            sequence_parallel_enabled,
            dtype,
            "meta",
            stride=stride,
            sequence_dimension=sequence_dimension,
            pad=pad,
            tensor_model_parallel_group=tensor_model_parallel_group,
            rank_ordering=rank_ordering,
        )
        config = _config(
            quantization_type, quantized_dtype, quantization_per_channel_axis, activation_quantization_type
        )
        quantization.use_quantized_weight(self, config, device)

    @classmethod
    def from_float(cls, mod: nxd_layers.ColumnParallelLinear, q_config: QuantizationConfig | None = None) -> Self:
        """Return a copy of the layer, which may be on the meta device, with a quantized weight. Called by all ranks.

        Raises:
            ValueError: an unsupported way of quantizing, or a layer that cannot be quantized.
        """
        return _from_float(cls, nxd_layers.ColumnParallelLinear, mod, q_config)


class QuantizedRowParallel(nxd_layers.RowParallelLinear):
    """`nxd_layers.RowParallelLinear` with a quantized weight; see `QuantizedColumnParallel` for the arguments."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        quantization_type: QuantizationType | str = "per_tensor_symmetric",
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        quantized_dtype: QuantizedDtype | torch.dtype = QuantizedDtype.INT8,
        device: torch.device | str | None = None,
        stride: int = 1,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        quantization_per_channel_axis: int | None = None,
        reduce_output: bool = True,
        tensor_model_parallel_group: Any = None,
        pad: bool = False,
        activation_quantization_type: ActivationQuantizationType | str | None = None,
        clamp_bound: float = float("inf"),
        block_axis: list[int] | None = None,
        block_size: list[int] | None = None,
        scale_dtype: Any = torch.float32,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias,
            input_is_parallel,
            sequence_parallel_enabled,
            dtype,
            "meta",
            stride=stride,
            sequence_dimension=sequence_dimension,
            pad=pad,
            reduce_output=reduce_output,
            tensor_model_parallel_group=tensor_model_parallel_group,
            rank_ordering=rank_ordering,
        )
        config = _config(
            quantization_type, quantized_dtype, quantization_per_channel_axis, activation_quantization_type
        )
        quantization.use_quantized_weight(self, config, device)

    @classmethod
    def from_float(cls, mod: nxd_layers.RowParallelLinear, q_config: QuantizationConfig | None = None) -> Self:
        """See `QuantizedColumnParallel.from_float`."""
        return _from_float(cls, nxd_layers.RowParallelLinear, mod, q_config)


BaseQuantizeParallelLinear.register(QuantizedColumnParallel)


BaseQuantizeParallelLinear.register(QuantizedRowParallel)


MODULE_MAPPINGS: dict[type[nn.Module], Any] = {
    nxd_layers.ColumnParallelLinear: QuantizedColumnParallel,
    nxd_layers.RowParallelLinear: QuantizedRowParallel,
}


def convert(
    module: nn.Module,
    q_config: QuantizationConfig | None = None,
    inplace: bool = False,
    mapping: Mapping[type[nn.Module], Any] | None = None,
    include: str | Sequence[str] | None = None,
    modules_to_not_convert: Sequence[str] | None = None,
) -> nn.Module:
    """See `nxd_layers.quantization.convert`.

    Args:
        mapping: quantized class, with a `from_float`, by layer class; `MODULE_MAPPINGS` if None.
    """
    functions = {old: new.from_float for old, new in (MODULE_MAPPINGS if mapping is None else mapping).items()}
    return quantization.convert(module, q_config, inplace, functions, include, modules_to_not_convert)


def _config(
    quantization_type: QuantizationType | str,
    quantized_dtype: QuantizedDtype | torch.dtype,
    per_channel_axis: int | None,
    activations: ActivationQuantizationType | str | None,
) -> QuantizationConfig:
    return QuantizationConfig(
        quantization_type=QuantizationType(quantization_type),
        quantized_dtype=QuantizedDtype(quantized_dtype),
        quantization_per_channel_axis=per_channel_axis,
        activation_quantization_type=ActivationQuantizationType(activations),
    )


def _from_float(cls: type[Any], plain: type[nn.Module], layer: Any, config: QuantizationConfig | None) -> Any:
    if not isinstance(layer, plain):
        raise ValueError(f"{cls.__name__}.from_float takes a {plain.__name__}; got a {type(layer).__name__}")
    made: Any = quantization.copy_with_metadata(layer)
    quantization.quantize_weight(made, config or quantization.default_config())
    made.__class__ = cls  # adds no state, so every flag of the layer is kept
    return made
