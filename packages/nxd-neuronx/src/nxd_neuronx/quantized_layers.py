"""Layers with quantized weights under the names and with the arguments of NeuronX Distributed, over nxd_layers."""

from abc import ABCMeta
from collections.abc import Mapping, Sequence
from typing import Any, Self

import nxd_layers
import torch
from nxd_layers import quantization
from nxd_layers.quantization import ActivationQuantizationType, QuantizationConfig, QuantizationType, QuantizedDtype
from torch import nn


class BaseQuantizeParallelLinear(nn.Module, metaclass=ABCMeta):
    """What every parallel layer with a quantized weight is an instance of."""


class QuantizedColumnParallel(nxd_layers.ColumnParallelLinear):
    """`nxd_layers.ColumnParallelLinear` with a quantized weight: zeros, until a state dict or `from_float` fills them.

    Arguments are those of `ColumnParallelLinear`, and these:

    Args:
        quantization_type: per tensor or per channel, its name or member.
        quantized_dtype: dtype of the weight's values.
        dtype: dtype of the bias.
        quantization_per_channel_axis: 0 or None: scales belong to outputs.
        activation_quantization_type: None: inputs stay as they are.
        keep_master_weight: without effect, like `block_axis`, `block_size`, `scale_dtype` and `clamp_bound`.

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
        """Return a copy of the layer with a quantized weight. Called by all ranks.

        Args:
            mod: a layer that may be on the meta device; then so is the result.
            q_config: how to quantize; None: `default_config()`.

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
        mapping: for a class of layers, the class whose `from_float` takes one; None: `MODULE_MAPPINGS`.
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
    made: Any = quantization.copy_model(layer)
    quantization.quantize_weight(made, config or quantization.default_config())
    made.__class__ = cls  # which adds no state: every flag of the layer is kept
    return made
