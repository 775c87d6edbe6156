"""Linear layers with this rank's part of their weights.

`nn.Linear` is replaced by the parallel layers of this package. `Conv1D` of transformers, as GPT-2 has it, stores its
weight transposed, `[in, out]`; that module stays, with a part of its parameters.
"""

from typing import Any, TypeVar

from torch import Tensor, nn

from nxd_layers.hf.shards import shard_parameter, take_part
from nxd_layers.hf.summed_bias import share_bias
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region

_Column = TypeVar("_Column", bound=ColumnParallelLinear)
_Row = TypeVar("_Row", bound=RowParallelLinear)


def column_parallel(
    linear: nn.Linear,
    *,
    gather_output: bool,
    stride: int = 1,
    pad: bool = False,
    cls: type[_Column] = ColumnParallelLinear,  # type: ignore[assignment]
) -> _Column:
    """`ColumnParallelLinear` (or a subclass) with the outputs of `linear`; the arguments are its own.

    Raises:
        ValueError: the outputs cannot be cut so.
    """
    layer = cls(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        gather_output=gather_output,
        dtype=linear.weight.dtype,
        device="meta",
        stride=stride,
        pad=pad,
    )
    take_over(linear, layer)
    return layer


def row_parallel(
    linear: nn.Linear,
    *,
    input_is_parallel: bool,
    pad: bool = False,
    cls: type[_Row] = RowParallelLinear,  # type: ignore[assignment]
) -> _Row:
    """`RowParallelLinear` (or a subclass) with the inputs of `linear`; the arguments are its own.

    Raises:
        ValueError: the inputs cannot be cut so.
    """
    layer = cls(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        input_is_parallel=input_is_parallel,
        dtype=linear.weight.dtype,
        device="meta",
        pad=pad,
    )
    take_over(linear, layer)
    return layer


def take_over(linear: nn.Linear, layer: ColumnParallelLinear | RowParallelLinear) -> None:
    """Give the layer its part of the linear's parameters, and what models ask a linear for."""
    layer.weight = take_part(layer.weight, linear.weight)
    if layer.bias is not None:
        layer.bias = take_part(layer.bias, linear.bias)
    layer.in_features, layer.out_features = linear.in_features, linear.out_features  # type: ignore[assignment]
    layer.training = linear.training


def split_conv1d_outputs(layer: Any, *, stride: int = 1) -> None:
    """Keep this rank's outputs, `[..., out/tp]`.

    Args:
        layer: a `Conv1D`.
        stride: number of matrices side by side, each of which is cut on its own.

    Raises:
        ValueError: the outputs cannot be cut so.
    """
    shard_parameter(layer, "weight", 1, stride=stride)
    shard_parameter(layer, "bias", 0, stride=stride)
    layer.nf = layer.bias.numel()
    layer.register_forward_pre_hook(_sum_gradient)


def split_conv1d_inputs(layer: Any) -> None:
    """Take this rank's inputs, `[..., in/tp]`, and sum the products.

    Raises:
        ValueError: the inputs cannot be cut so.
    """
    shard_parameter(layer, "weight", 0)
    layer.nx = layer.weight.shape[0]
    share_bias(layer, "bias")
    layer.register_forward_hook(_sum_output)


def _sum_gradient(layer: nn.Module, args: Any) -> tuple[Any, ...]:
    return copy_to_tensor_model_parallel_region(args[0]), *args[1:]


def _sum_output(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    return reduce_from_tensor_model_parallel_region(output)
