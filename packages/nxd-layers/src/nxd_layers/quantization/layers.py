"""Linear layers whose weights are int8 or fp8 values with scales.

`quantize_weight` changes how a column- or row-parallel layer stores its weight; all else stays as the layer has it. The
product is computed in the input's dtype with the values as they are, and its outputs are scaled: each scale belongs to
one output, so that is the same as scaling the weight. Quantized weights are not trained; gradients of inputs are
complete.
"""

from dataclasses import replace
from functools import partial
from typing import Self

import torch
from nxd_state import Box, ShardSpec
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.quantization.tensors import (
    ActivationQuantizationType,
    QuantizationConfig,
    QuantizationType,
    QuantizedDtype,
    quantize,
)

_WAYS = (QuantizationType.PER_TENSOR_SYMMETRIC, QuantizationType.PER_CHANNEL_SYMMETRIC)
_DTYPES = (QuantizedDtype.INT8, QuantizedDtype.F8E4M3, QuantizedDtype.F8E5M2)
_SUPPORTED = (
    "stride",
    "padding",
    "rank_ordering",
    "tensor_model_parallel_group",
    "gather_output",
    "sequence_parallel_enabled",
    "skip_bias_add",
    "keep_padded_output",
    "reduce_dtype",
    "input_is_parallel",
    "reduce_output",
)

ParallelLinear = ColumnParallelLinear | RowParallelLinear


@torch.no_grad()
def quantize_weight(layer: ParallelLinear, config: QuantizationConfig) -> None:
    """Quantize the weight of a layer, in place. Called by all ranks, which may share a scale.

    Args:
        layer: a float layer; on the meta device only its parameters are exchanged, for a state dict to fill them.
        config: which values and scales; see `default_config`.

    Raises:
        ValueError: an unsupported way of quantizing, a layer of another class, or one with an adapter or a forward of
            its own.
    """
    _check_class(layer)
    layer.check_features(_SUPPORTED, by="quantization", remedy="leave it out (modules_to_not_convert)")
    way, dtype = _checked_config(config)
    per_channel = way is QuantizationType.PER_CHANNEL_SYMMETRIC
    weight, bias = layer.weight, layer.bias
    _replace_parameters(layer, dtype, weight.device, per_channel=per_channel)
    if weight.is_meta:
        return
    shares_scale = not per_channel or layer.output_split_dim is None
    values, scale = quantize(
        weight,
        dtype.value,
        channel_axis=0 if per_channel else None,
        group=layer.group() if shares_scale else None,
    )
    assert layer.scale is not None
    layer.weight.data.copy_(values)
    layer.scale.copy_(scale)
    if layer.bias is not None and bias is not None:
        layer.bias.copy_(bias)


def use_quantized_weight(layer: ParallelLinear, config: QuantizationConfig, device: torch.device | str | None) -> None:
    """Replace the parameters of a layer by those of a quantized weight: zeros, with scales of one.

    Args:
        layer: any float layer, whose values are dropped.
        config: which values and scales.
        device: device of the new parameters; None: torch's default device.

    Raises:
        ValueError: an unsupported way of quantizing.
    """
    _check_class(layer)
    way, dtype = _checked_config(config)
    _replace_parameters(layer, dtype, device, per_channel=way is QuantizationType.PER_CHANNEL_SYMMETRIC)


def _check_class(layer: object) -> None:
    if not isinstance(layer, ParallelLinear):
        raise ValueError(
            f"a {type(layer).__name__} does not support a quantized weight; only ColumnParallelLinear and "
            "RowParallelLinear do"
        )


def _replace_parameters(
    layer: ParallelLinear, dtype: QuantizedDtype, device: torch.device | str | None, *, per_channel: bool
) -> None:
    bias_dtype = None if layer.bias is None else layer.bias.dtype
    new_parameter = partial(layer.new_parameter, device=device, requires_grad=False)
    layer.weight = new_parameter(layer.weight_spec, dtype.value, split_dim=layer.partition_dim)
    if per_channel:
        spec = _with_dim_of_one(layer.bias_spec)
        layer.scale = new_parameter(spec, torch.float32, split_dim=layer.output_split_dim)
    else:
        layer.scale = new_parameter(ShardSpec.whole((1,)), torch.float32, split_dim=None)
    if bias_dtype is not None:
        layer.bias = new_parameter(layer.bias_spec, bias_dtype, split_dim=layer.output_split_dim)
    layer.reset_parameters()


def _checked_config(config: QuantizationConfig) -> tuple[QuantizationType, QuantizedDtype]:
    """Return the way of quantizing and the dtype of the values."""
    way = QuantizationType(config.get("quantization_type", QuantizationType.PER_TENSOR_SYMMETRIC))
    dtype = QuantizedDtype(config.get("quantized_dtype", QuantizedDtype.INT8))
    axis = config.get("quantization_per_channel_axis")
    activations = ActivationQuantizationType(config.get("activation_quantization_type"))
    unsupported = {
        f"{way.value}, {dtype.name}": way not in _WAYS or dtype not in _DTYPES,
        f"quantization_per_channel_axis={axis}": bool(axis),
        f"activation_quantization_type={activations.value}": activations.value is not None,
    }
    if any(unsupported.values()):
        what = ", ".join(text for text, is_asked in unsupported.items() if is_asked)
        raise ValueError(
            f"{what}: not supported; weights are quantized per tensor or per output channel, to int8, f8e4m3 or "
            "f8e5m2, and inputs stay as they are"
        )
    return way, dtype


class QuantizedLinear(nn.Module):
    """`nn.Linear` with quantized weights, whole on every rank.

    Args:
        weight: values `[out, in]`.
        scale: float32 `[1]` or `[out, 1]`.
        bias: `[out]` or None.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, input_: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        output = (F.linear(input_, self.weight.to(input_.dtype)) * self.scale.t()).to(input_.dtype)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    @classmethod
    def from_float(cls, mod: nn.Linear, dtype: torch.dtype = torch.int8, *, per_channel: bool = True) -> Self:
        """Return the layer with quantized weights.

        Raises:
            ValueError: `dtype` is not a dtype of quantized values.
        """
        values, scale = quantize(mod.weight, dtype, channel_axis=0 if per_channel else None)
        return cls(values, scale, mod.bias)


def _with_dim_of_one(spec: ShardSpec) -> ShardSpec:
    """Return the shard metadata of `[out, 1]` for that of `[out]`."""

    def column(box: Box) -> Box:
        return Box((*box.offset, 0), (*box.shape, 1))

    pieces = tuple(
        replace(it, local=column(it.local), logical=column(it.logical), logical_shape=(*it.logical_shape, 1))
        for it in spec.pieces
    )
    return replace(spec, local_shape=(*spec.local_shape, 1), pieces=pieces)
