"""The branch beside linear layers: plain ones, convolutions, and those whose weight is split along outputs or inputs.

Only products with A, `[..., r]`, are communicated, never a second copy of what the layer itself communicates. In a
sequence-parallel region they are communicated like the layer's own input or output. A factor that is whole on every
rank then sees only part of the sequence, so its gradient is partial (`make_factor`). All other gradients are complete.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from nxd_layers.initialization import InitMethod, default_linear_init, empty_parameter, fill_from_logical
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear, gathered_output
from nxd_layers.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    local_part,
    reduce_from_tensor_model_parallel_region_,
    reduce_scatter_to_sequence_parallel_region,
)
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from nxd_layers.sharded_linear import ShardedLinear
from nxd_layers.shared_input import SharedCall
from nxd_state import active_group, get_shard_spec, shard_along
from nxd_state.parameter_marks import is_sequence_parallel
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_lora.adapter import (
    LayerKind,
    LoraAdapter,
    adapter_of,
    complete_factor,
    factor,
    fill_factor,
    make_factor,
    product,
    require_adapter,
    scale_of,
)
from nxd_lora.config import LoraConfig

FACTOR_NAMES = ("lora_A", "lora_B")


def branch_dropout(input_: Tensor, probability: float, *, training: bool, split_dim: int | None = None) -> Tensor:
    """Drop elements of a branch's input.

    Every tensor-parallel rank draws the mask of the whole input from the stream that these ranks share and takes its
    part. So ranks that hold the same elements drop the same ones, and the masks do not depend on the layout.

    Args:
        input_: a tensor of any shape.
        probability: the probability of dropping an element, below 1.
        training: whether to drop; False keeps everything.
        split_dim: the dim along which the input is split over the tensor-parallel ranks, or None.
    """
    if probability == 0.0 or not training:
        return input_
    group = active_group("tp")
    shape = list(input_.shape)
    if split_dim is not None:
        shape[split_dim] *= group.size
    kept = torch.empty(shape, dtype=torch.bool, device=input_.device).bernoulli_(1.0 - probability)
    if split_dim is not None and group.size > 1:
        kept = local_part(kept, group, split_dim)
    return input_ * kept * (1.0 / (1.0 - probability))


def init_of_a(config: LoraConfig) -> InitMethod:
    """Return an initializer for A: that of nn.Linear's weight, or N(0, 1/r^2)."""
    if config.init_lora_weights == "default":
        return default_linear_init
    return lambda values: nn.init.normal_(values, std=1.0 / config.lora_rank)


def add_linear_factors(layer: Any, config: LoraConfig, *, sizes: tuple[int, int], out_dim: int = 0) -> None:
    """Register A and B with `layer`."""
    rank = config.lora_rank
    parallel = getattr(layer, "sequence_parallel_enabled", None)
    partial = is_sequence_parallel(layer.weight) if parallel is None else parallel
    layer.lora_A = make_factor(layer.weight, 1 - out_dim, lora_rank=rank, rank_dim=0, sequence_parallel=partial)
    layer.lora_B = make_factor(layer.weight, out_dim, lora_rank=rank, rank_dim=1, sequence_parallel=partial)
    fill_factor(layer.lora_A, sizes[0], rank_dim=0, init_method=init_of_a(config))
    fill_factor(layer.lora_B, sizes[1], rank_dim=1, init_method=nn.init.zeros_)


def scaled_down(layer: nn.Module, input_: Tensor, weight: Tensor, *, split_dim: int | None = None) -> Tensor:
    """`scale * dropout(input) A^T`, `[..., r]`."""
    adapter = require_adapter(layer)
    dropped = branch_dropout(input_, adapter.dropout, training=layer.training, split_dim=split_dim)
    return F.linear(dropped, weight) * adapter.scale


def _product(layer: Any) -> Tensor:
    """`scale * B A`, `[out, in]` on this rank."""
    return scale_of(layer) * product(layer.lora_B, layer.lora_A)


# Plain layers: whole on every rank, or with part of the weight if hooks communicate, as around Conv1D.


def _linear_delta(layer: nn.Module, input_: Tensor) -> Tensor:
    a, b = complete_factor(layer, 0), complete_factor(layer, 1)
    split_dim = None if get_shard_spec(layer.get_parameter(FACTOR_NAMES[0])) is None else -1
    return F.linear(scaled_down(layer, input_, a, split_dim=split_dim), b)


def add_plain_factors(layer: Any, config: LoraConfig, part: str) -> None:
    """Register A and B with a layer that has the sizes of `nn.Linear`."""
    add_linear_factors(layer, config, sizes=(layer.in_features, layer.out_features))


def _add_transposed_factors(layer: Any, config: LoraConfig, part: str) -> None:
    spec = get_shard_spec(layer.weight)
    sizes = layer.weight.shape if spec is None else spec.pieces[0].logical_shape
    add_linear_factors(layer, config, sizes=(sizes[0], sizes[1]), out_dim=1)


def weight_delta(layer: Any) -> dict[str, Tensor]:
    """Return the values that merging adds to `weight`."""
    return {"weight": _product(layer)}


def _transposed_weight_delta(layer: Any) -> dict[str, Tensor]:
    return {"weight": _product(layer).t()}


def every_row(layer: nn.Module, part: str) -> tuple[str, slice]:
    """All rows of `weight`."""
    return "weight", slice(None)


PLAIN_LINEAR = LayerKind(FACTOR_NAMES, add_plain_factors, _linear_delta, weight_delta, rows=every_row, is_linear=True)
# Hugging Face's Conv1D (GPT-2) is a linear layer with its weight transposed, [in, out].
TRANSPOSED_LINEAR = LayerKind(
    FACTOR_NAMES, _add_transposed_factors, _linear_delta, _transposed_weight_delta, is_linear=True
)


# Features of parallel layers that a branch beside the layer carries. What a forward of its own does is inspected by
# `subclasses`.
_SUPPORTED = (
    "padding",
    "gather_output",
    "keep_padded_output",
    "sequence_parallel_enabled",
    "input_is_parallel",
    "reduce_dtype",
    "forward",
    "adapter",
)


def check_parallel_features(layer: ShardedLinear, supported: Collection[str]) -> None:
    """Raise a ValueError for a layer with features that adapters do not support."""
    layer.check_features(supported, by="an adapter", remedy="leave it out of target_modules")


def _add_parallel_factors(layer: Any, config: LoraConfig, part: str) -> None:
    supported = (*_SUPPORTED, "stride") if isinstance(layer, ColumnParallelLinear) else _SUPPORTED
    check_parallel_features(layer, supported)
    add_linear_factors(layer, config, sizes=(layer.input_size, layer.output_size))


# Column-parallel: A whole, B split along outputs.


def column_deltas(input_: Tensor, layers: Sequence[ColumnParallelLinear]) -> list[Tensor]:
    """The branches of several column-parallel layers of one input, with one collective per direction for all.

    Args:
        input_: `[..., in]`, or this rank's part of the sequence.
        layers: adapted layers with the same sequence-parallel arguments.

    Returns:
        The contribution to each layer's output.
    """
    if len({layer.gather_output for layer in layers}) > 1:
        return [column_deltas(input_, [layer])[0] for layer in layers]
    first = layers[0]
    split_dim = first.sequence_dimension if first.sequence_parallel_enabled else None
    downs = [scaled_down(layer, input_, factor(layer, 0), split_dim=split_dim) for layer in layers]
    crossed = to_columns(torch.cat(downs, dim=-1) if len(downs) > 1 else downs[0], first)
    parts = torch.split(crossed, [down.shape[-1] for down in downs], dim=-1)
    return [F.linear(part, _rows_for_output(layer)) for part, layer in zip(parts, layers, strict=True)]


def to_columns(down: Tensor, layer: ColumnParallelLinear | GQAQKVColumnParallelLinear) -> Tensor:
    """Return `down` for the column-sharded B: full on each rank, with a gradient that is summed over the ranks."""
    if layer.sequence_parallel_enabled:
        return gather_from_sequence_parallel_region(
            down, layer.sequence_dimension, to_model_parallel=not layer.gather_output
        )
    return down if layer.gather_output else copy_to_tensor_model_parallel_region(down)


def _rows_for_output(layer: ColumnParallelLinear) -> Tensor:
    """B for the layer's returned outputs. Gathering B is cheaper than gathering its product."""
    rows = factor(layer, 1)
    return gathered_output(rows.t(), layer).t() if layer.gather_output and layer.tensor_parallel_size > 1 else rows


def _column_delta(layer: ColumnParallelLinear, input_: Tensor, call: SharedCall | None = None) -> Tensor:
    if call is None or input_ is not call.input_:
        return column_deltas(input_, [layer])[0]
    if not call.branches:
        adapted = [other for other in call.layers if _is_added(adapter_of(other))]
        call.branches.update(zip(adapted, column_deltas(input_, adapted), strict=True))
    return call.branches[layer]


def _is_added(adapter: LoraAdapter | None) -> bool:
    return adapter is not None and adapter.is_added


COLUMN_PARALLEL_LINEAR = LayerKind(
    FACTOR_NAMES, _add_parallel_factors, _column_delta, weight_delta, rows=every_row, is_linear=True
)


# Row-parallel: A split along inputs, B whole.


def _row_delta(layer: RowParallelLinear, input_: Tensor) -> Tensor:
    rows, columns = factor(layer, 1), factor(layer, 0)
    if not layer.input_is_parallel:
        # The input is whole on every rank: gathering A is cheaper than splitting the input a second time.
        whole = gather_from_tensor_model_parallel_region(columns)[:, : layer.input_size]
        return F.linear(scaled_down(layer, input_, whole), rows)
    down = scaled_down(layer, input_, columns, split_dim=-1)
    if layer.sequence_parallel_enabled:
        return F.linear(reduce_scatter_to_sequence_parallel_region(down, layer.sequence_dimension), rows)
    return F.linear(reduce_from_tensor_model_parallel_region_(down), rows)


ROW_PARALLEL_LINEAR = LayerKind(
    FACTOR_NAMES, _add_parallel_factors, _row_delta, weight_delta, rows=every_row, is_linear=True
)


# Plain 2-D convolutions, whole on every rank. A `[r, in, height, width]` is a convolution with the layer's own kernel,
# stride and padding into few channels, which B `[out, r, 1, 1]` projects up, as in PEFT.


def _add_conv_factors(layer: nn.Conv2d, config: LoraConfig, part: str) -> None:
    if layer.groups > 1 or layer.padding_mode != "zeros":
        raise ValueError(
            f"{layer} has groups={layer.groups} and padding_mode={layer.padding_mode!r}, but adapters support only "
            "groups=1 and 'zeros'; leave it out of target_modules"
        )
    rank, like = config.lora_rank, layer.weight
    shapes = ((rank, layer.in_channels, *layer.kernel_size), (layer.out_channels, rank, 1, 1))
    for name, shape, fill in zip(FACTOR_NAMES, shapes, (init_of_a(config), nn.init.zeros_), strict=True):
        whole = empty_parameter(shape, like.dtype, like.device)
        fill_from_logical(whole, shard_along(shape, 0, rank=0, size=1), shape, fill)
        layer.register_parameter(name, whole)


def _conv_delta(layer: nn.Conv2d, input_: Tensor) -> Tensor:
    dropped = branch_dropout(input_, require_adapter(layer).dropout, training=layer.training)
    short = F.conv2d(dropped, factor(layer, 0), None, layer.stride, layer.padding, layer.dilation)
    return F.conv2d(short * scale_of(layer), factor(layer, 1))


def _conv_weight_delta(layer: Any) -> dict[str, Tensor]:
    whole = product(layer.lora_B.flatten(1), layer.lora_A.flatten(1))  # [out, in * height * width]
    return {"weight": scale_of(layer) * whole.view_as(layer.weight)}


PLAIN_CONV2D = LayerKind(FACTOR_NAMES, _add_conv_factors, _conv_delta, _conv_weight_delta)
