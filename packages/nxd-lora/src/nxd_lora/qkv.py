"""The branches of layers that hold copies of key and value heads.

`GQAQKVColumnParallelLinear` has one adapter for each of q, k and v, any of which may be missing. They are adapters of
three column-parallel layers with these logical names; see `linear`. B of keys and values is copied like the heads, and
the gradients of the copies are summed like those of the weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from nxd_layers.hf.head_linears import CopiedHeadsLinear
from nxd_layers.initialization import empty_parameter, fill_from_logical
from nxd_layers.mappings import copy_to_tensor_model_parallel_region
from nxd_layers.qkv_linear import PROJECTIONS, GQAQKVColumnParallelLinear
from nxd_state import set_partition_attributes, set_shard_spec, shard_along
from nxd_state.parameter_marks import mark_sequence_parallel
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nxd_lora.adapter import (
    LayerKind,
    factor,
    factor_spec,
    fill_factor,
    product,
    require_adapter,
    scale_of,
)
from nxd_lora.config import LoraConfig
from nxd_lora.linear import (
    FACTOR_NAMES,
    add_plain_factors,
    check_parallel_features,
    every_row,
    init_of_a,
    scaled_down,
    to_columns,
    weight_delta,
)

_SUPPORTED = ("padding", "gather_output", "sequence_parallel_enabled", "reduce_dtype", "forward", "adapter")


def _add_factors(layer: GQAQKVColumnParallelLinear, config: LoraConfig, part: str) -> None:
    check_parallel_features(layer, _SUPPORTED)
    layer.register_parameter(f"lora_A_{part}", _whole_factor(layer, part, config))
    layer.register_parameter(f"lora_B_{part}", _split_factor(layer, part, config))


def _whole_factor(layer: GQAQKVColumnParallelLinear, part: str, config: LoraConfig) -> nn.Parameter:
    """Make and fill A; it has shard metadata, for its name."""
    shape, name = (config.lora_rank, layer.input_size), f"{PROJECTIONS[part]}.lora_A"
    weight = next(layer.parameters())
    whole = empty_parameter(shape, weight.dtype, weight.device)
    set_shard_spec(whole, shard_along(shape, 0, rank=0, size=1, copies=layer.tensor_parallel_size, name=name))
    mark_sequence_parallel(whole, layer.sequence_parallel_enabled)
    fill_factor(whole, layer.input_size, rank_dim=0, init_method=init_of_a(config))
    return whole


def _split_factor(layer: GQAQKVColumnParallelLinear, part: str, config: LoraConfig) -> nn.Parameter:
    """Make and fill B."""
    rank, name = config.lora_rank, f"{PROJECTIONS[part]}.lora_B"
    spec = factor_spec(layer.projection_spec(part), 0, lora_rank=rank, rank_dim=1, name=name)
    weight = next(layer.parameters())
    split = empty_parameter(spec.local_shape, weight.dtype, weight.device)
    set_shard_spec(split, spec)
    if layer.tensor_parallel_size > 1:
        set_partition_attributes(split, partition_dim=0, num_partitions=layer.tensor_parallel_size)
    fill_from_logical(split, spec, (layer.q_size if part == "q" else layer.kv_size, rank), nn.init.zeros_)
    return split


def _deltas(layer: GQAQKVColumnParallelLinear, input_: Tensor) -> tuple[Tensor | None, ...]:
    parts = require_adapter(layer).parts
    split_dim = layer.sequence_dimension if layer.sequence_parallel_enabled else None
    downs = [scaled_down(layer, input_, factor(layer, 0, part), split_dim=split_dim) for part in parts]
    crossed = to_columns(torch.cat(downs, dim=-1), layer).chunk(len(parts), dim=-1)
    rows = _rows_for_output(layer, parts)
    deltas = {part: F.linear(down, whole) for part, down, whole in zip(parts, crossed, rows, strict=True)}
    return tuple(deltas.get(part) for part in PROJECTIONS)


def _rows_for_output(layer: GQAQKVColumnParallelLinear, parts: Sequence[str]) -> list[Tensor]:
    """B for the layer's returned outputs."""
    rows = {part: factor(layer, 1, part) for part in parts}
    copied = [part for part in parts if part != "q"]
    copies = layer.head_copies()
    if copies is not None and copied:
        rows |= zip(copied, _CopiedRows.apply(copies, *[rows[part] for part in copied]), strict=True)
    if not layer.gather_output:
        return list(rows.values())
    whole = layer.gathered(torch.cat(list(rows.values())).t(), parts)  # cheaper than gathering its product
    return [columns.t() for columns in whole]


class _CopiedRows(Function):
    """Rows of key and value heads: unchanged in forward; in backward the gradients of a head's copies are summed.

    Arguments of `forward`: `HeadCopies`, then tensors `[kv * kv_size_multiplier/tp, r]`.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        # One tuple argument: torch.compile detects whether `forward` takes a ctx by counting parameters and arguments.
        ctx.copies, *rows = arguments
        return tuple(part.view_as(part) for part in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sums = [grad.clone(memory_format=torch.contiguous_format) for grad in grads]
        ctx.copies.start_sum(sums)()
        return None, *sums


def _weight_deltas(layer: GQAQKVColumnParallelLinear) -> dict[str, Tensor]:
    products = {
        part: scale_of(layer) * product(getattr(layer, f"lora_B_{part}"), getattr(layer, f"lora_A_{part}"))
        for part in require_adapter(layer).parts
    }
    if not layer.fuse_qkv:
        return {f"weight_{part}": it for part, it in products.items()}
    like = next(iter(products.values()))
    sections = [
        products[part] if part in products else like.new_zeros(layer.projection_spec(part).local_shape)
        for part in PROJECTIONS
    ]
    return {"weight_qkv": torch.cat(sections)}


def _bias_names(layer: GQAQKVColumnParallelLinear, parts: Sequence[str]) -> list[str]:
    names = ["bias_qkv"] if layer.fuse_qkv else [f"bias_{part}" for part in parts]
    if getattr(layer, names[0]) is None:
        return []
    if layer.fuse_qkv and len(parts) < len(PROJECTIONS):
        raise ValueError(
            f"bias='lora_only' would train the biases of {', '.join(PROJECTIONS[part] for part in parts)} alone, but a "
            "fused GQAQKVColumnParallelLinear has one bias for all projections; build it with fuse_qkv=False, use "
            "bias='none' or 'all', or adapt q_proj, k_proj and v_proj"
        )
    return names


def _rows(layer: GQAQKVColumnParallelLinear, part: str) -> tuple[str, slice]:
    if not layer.fuse_qkv:
        return f"weight_{part}", slice(None)
    start = 0
    for name in PROJECTIONS:
        length = layer.projection_spec(name).local_shape[0]
        if name == part:
            break
        start += length
    return "weight_qkv", slice(start, start + length)


def _with_complete_gradient(layer: GQAQKVColumnParallelLinear | CopiedHeadsLinear, part: str, values: Tensor) -> Tensor:
    copies = layer.head_copies()
    if copies is None or part == "q":
        return values
    [rows] = _CopiedRows.apply(copies, values.unsqueeze(1))
    return rows.squeeze(1)


QKV_LINEAR = LayerKind(
    FACTOR_NAMES,
    _add_factors,
    _deltas,
    _weight_deltas,
    parts=PROJECTIONS,
    bias_names=_bias_names,
    rows=_rows,
    with_complete_gradient=_with_complete_gradient,
)


# The projection for keys or values of a transformers model.


def _copied_delta(layer: CopiedHeadsLinear, input_: Tensor) -> Tensor:
    down = copy_to_tensor_model_parallel_region(scaled_down(layer, input_, factor(layer, 0)))
    [rows] = _CopiedRows.apply(layer.head_copies(), factor(layer, 1))
    return F.linear(down, rows)


COPIED_HEADS_LINEAR = LayerKind(
    FACTOR_NAMES,
    add_plain_factors,
    _copied_delta,
    weight_delta,
    rows=every_row,
    with_complete_gradient=_with_complete_gradient,
    is_linear=True,
)
