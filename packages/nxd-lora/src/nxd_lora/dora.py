"""DoRA (Liu et al. 2024): an adapted weight as a direction, `W + scale B A`, and a magnitude for each of its rows.

The rows of the direction have norm 1, and the magnitudes train. As in PEFT, autograd treats the norms in the
denominator as constants. If a row is split over several ranks, its norm is that of the whole row.
"""

from dataclasses import replace
from typing import Any

import torch
from nxd_layers.initialization import empty_parameter
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear, gathered_output
from nxd_layers.padding import zero_padding_gradient
from nxd_state import (
    active_group,
    all_reduce,
    at_least_float32,
    get_shard_spec,
    set_partition_attributes,
    set_shard_spec,
)
from nxd_state.parameter_marks import is_sequence_parallel, mark_sequence_parallel
from torch import Tensor, nn

from nxd_lora.adapter import LoraAdapter, factor_name, product, require_adapter

MAGNITUDE = "lora_magnitude_vector"


def add_magnitudes(layer: nn.Module) -> None:
    """Give the parts of an adapted layer their magnitudes, `[out]`, split as B is, and fill them."""
    adapter = require_adapter(layer)
    if adapter.kind.rows is None or (len(adapter.kind.parts) > 1 and getattr(layer, "gather_output", False)):
        raise ValueError(f"use_dora=True does not support {type(layer).__name__}; leave it out of target_modules")
    for part in adapter.parts:
        like = layer.get_parameter(factor_name(adapter.kind.factor_names[1], part))
        magnitude = empty_parameter((like.shape[0],), like.dtype, like.device)
        spec = get_shard_spec(like)
        if spec is None:
            mark_sequence_parallel(magnitude, is_sequence_parallel(like))
        else:
            own, other = MAGNITUDE, adapter.kind.factor_names[1]
            pieces = [
                replace(
                    piece,
                    local=replace(piece.local, offset=piece.local.offset[:1], shape=piece.local.shape[:1]),
                    logical=replace(piece.logical, offset=piece.logical.offset[:1], shape=piece.logical.shape[:1]),
                    logical_shape=piece.logical_shape[:1],
                    name=piece.name.replace(other, own),
                )
                for piece in spec.pieces
            ]
            set_shard_spec(magnitude, replace(spec, local_shape=spec.local_shape[:1], pieces=tuple(pieces)))
            if (degree := active_group("tp").size) > 1:
                set_partition_attributes(magnitude, partition_dim=0, num_partitions=degree)
        layer.register_parameter(factor_name(MAGNITUDE, part), magnitude)
    reset_magnitudes(layer)


@torch.no_grad()
def reset_magnitudes(layer: nn.Module) -> None:
    """Set the magnitudes from the current weights, adapters included, so that they change nothing."""
    for part in require_adapter(layer).parts:
        layer.get_parameter(factor_name(MAGNITUDE, part)).copy_(_norms(layer, part))


def with_magnitudes(layer: Any, output: Any, delta: Any) -> Any:
    """The output of an adapted layer.

    Args:
        layer: a layer with magnitudes.
        output: the layer's output without its adapter, or one output per part of the layer.
        delta: the adapter's contribution to the output; None for parts without an adapter.
    """
    if isinstance(output, Tensor):
        return _scaled(layer, "", output, delta)
    parts = layer.lora.kind.parts
    return tuple(
        whole if own is None else _scaled(layer, part, whole, own)
        for part, whole, own in zip(parts, output, delta, strict=True)
    )


@torch.no_grad()
def scale_rows(layer: nn.Module, name: str, whole: Tensor, gains: dict[str, Tensor]) -> None:
    """Multiply the rows of `W + scale B A`, of the parameter with this name, by their gains, in place."""
    for part, gain in gains.items():
        own, rows = _rows(require_adapter(layer), layer, part)
        if own == name:
            whole[rows].mul_(gain.unsqueeze(1))


@torch.no_grad()
def gains_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return the factors of the rows of each part's `W + scale B A`, `[out]`."""
    return {part: _gain(layer, part) for part in require_adapter(layer).parts}


def _scaled(layer: Any, part: str, output: Tensor, delta: Tensor) -> Tensor:
    gain, bias = _gain(layer, part), _bias(layer, part)
    if isinstance(layer, ColumnParallelLinear) and layer.gather_output and layer.tensor_parallel_size > 1:
        gain = gathered_output(gain.unsqueeze(0), layer).squeeze(0)
        bias = None if bias is None else gathered_output(bias.unsqueeze(0), layer).squeeze(0)
    gain = gain.to(output.dtype)
    if bias is None:
        return gain * (output + delta)
    return gain * (output - bias + delta) + bias


def _gain(layer: Any, part: str) -> Tensor:
    """Magnitudes over norms; 1 for rows of padding, which are zeros."""
    magnitude: nn.Parameter = layer.get_parameter(factor_name(MAGNITUDE, part))
    spec = get_shard_spec(magnitude)
    given = magnitude if spec is None else zero_padding_gradient(magnitude, spec)
    complete = require_adapter(layer).kind.with_complete_gradient(layer, part, given)
    norms = _norms(layer, part)
    return torch.where(norms > 0, at_least_float32(complete) / norms.where(norms > 0, 1.0), 1.0)


@torch.no_grad()
def _norms(layer: Any, part: str) -> Tensor:
    """Return the norms of the rows of `W + scale B A`, `[out]` on this rank."""
    adapter = require_adapter(layer)
    a, b = (layer.get_parameter(factor_name(name, part)) for name in adapter.kind.factor_names)
    name, rows = _rows(adapter, layer, part)
    squares = (at_least_float32(layer.get_parameter(name)[rows]) + adapter.scale * product(b, a)).square().sum(dim=1)
    if isinstance(layer, RowParallelLinear) and layer.tensor_parallel_size > 1:
        squares = all_reduce(squares, active_group("tp"))
    return squares.sqrt()


def _rows(adapter: LoraAdapter, layer: nn.Module, part: str) -> tuple[str, slice]:
    assert adapter.kind.rows is not None, "layers without rows get no magnitudes"
    return adapter.kind.rows(layer, part)


def _bias(layer: Any, part: str) -> Tensor | None:
    names = require_adapter(layer).kind.bias_names(layer, [part])
    if not names:
        return None
    bias: Tensor = layer.get_parameter(names[0])
    return bias
