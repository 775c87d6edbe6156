"""Replacing plain linear layers by parallel ones with this rank's part of their weights."""

from typing import TypeVar

from torch import nn

from nxd_layers.hf.shards import take_part
from nxd_layers.linear import ColumnParallelLinear
from nxd_layers.row_linear import RowParallelLinear

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
