"""Linear layers whose weights are int8 or fp8 values with scales.

`quantize_weight` changes how a column- or row-parallel layer stores its weight; all else stays as the layer has it. The
product is computed in the input's dtype with the values as they are, and its outputs are scaled: each scale belongs to
one output, so that is the same as scaling the weight. Quantized weights do not learn; gradients of inputs are complete.
"""

from dataclasses import replace
from typing import Self

import torch
from nxd_state import Box, ShardSpec, set_partition_attributes, set_shard_spec
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
        ValueError: an unsupported way of quantizing, or the layer has an adapter or a forward of its own.
    """
    layer.check_features(_SUPPORTED, by="quantization", remedy="leave it out (modules_to_not_convert)")
    way, dtype = checked_config(config)
    per_channel = way is QuantizationType.PER_CHANNEL_SYMMETRIC
    weight, bias = layer.weight, layer.bias
    use_quantized_weight(layer, config, weight.device)
    if weight.is_meta or layer.scale is None:
        return
    shares_scale = not per_channel or layer.partition_dim == 1
    values, scale = quantize(
        weight,
        dtype.value,
        channel_axis=0 if per_channel else None,
        group=layer.group() if shares_scale else None,
    )
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
    way, dtype = checked_config(config)
    size = layer.tensor_parallel_size
    outputs_split = layer.partition_dim == 0
    scale_spec = ShardSpec.whole((1,))
    per_channel = way is QuantizationType.PER_CHANNEL_SYMMETRIC
    if per_channel:
        scale_spec = _scales_of_rows(layer.weight_spec, whole=not outputs_split)
    bias_dtype = None if layer.bias is None else layer.bias.dtype
    layer.weight = _frozen(layer.weight_spec, dtype.value, device, layer.partition_dim, size, layer.num_matrices)
    stride = layer.num_matrices if outputs_split else 1
    layer.scale = _frozen(scale_spec, torch.float32, device, 0, size if outputs_split and per_channel else 1, stride)
    if bias_dtype is not None:
        layer.bias = _frozen(layer.bias_spec, bias_dtype, device, 0, size if outputs_split else 1, stride)
    layer.reset_parameters()


def checked_config(config: QuantizationConfig) -> tuple[QuantizationType, QuantizedDtype]:
    """Return the way of quantizing and the dtype of the values.

    Raises:
        ValueError: either is unsupported.
    """
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


def _scales_of_rows(weight: ShardSpec, *, whole: bool) -> ShardSpec:
    """Return the shard metadata of one scale for each row `[out, 1]` of a weight; `whole`: on every rank."""
    logical_rows = weight.pieces[0].logical_shape[0]
    if whole:
        return ShardSpec.whole((logical_rows, 1))

    def column(box: Box) -> Box:
        return Box((box.offset[0], 0), (box.shape[0], 1))

    pieces = tuple(
        replace(piece, local=column(piece.local), logical=column(piece.logical), logical_shape=(logical_rows, 1))
        for piece in weight.pieces
    )
    return replace(weight, local_shape=(weight.local_shape[0], 1), pieces=pieces)


def _frozen(
    spec: ShardSpec,
    dtype: torch.dtype,
    device: torch.device | str | None,
    partition_dim: int,
    num_partitions: int,
    stride: int,
) -> nn.Parameter:
    """Return a parameter of zeros that does not learn, with its shard metadata."""
    parameter = nn.Parameter(torch.zeros(spec.local_shape, dtype=dtype, device=device), requires_grad=False)
    if num_partitions > 1:
        set_shard_spec(parameter, spec)
        set_partition_attributes(parameter, partition_dim=partition_dim, num_partitions=num_partitions, stride=stride)
    return parameter
