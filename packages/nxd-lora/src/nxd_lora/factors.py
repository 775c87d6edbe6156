"""The two factors of an adapter, A `[r, in]` and B `[out, r]`, as parameters of the layer that they adapt.

The factor that meets the split dim of the layer's weight is split in the same way, strides, padding and copies
included; the other one is whole on every rank. Values are drawn as the layers' own are: the whole tensor in float32
on the CPU, so that they do not depend on the layout.
"""

from dataclasses import replace

from nxd_layers.initialization import InitMethod, empty_parameter, empty_sharded_parameter, fill_from_logical
from nxd_state import Box, ShardSpec, get_shard_spec, shard_along
from torch import nn


def make_factor(
    weight: nn.Parameter, weight_dim: int, *, lora_rank: int, rank_dim: int, sequence_parallel: bool
) -> nn.Parameter:
    """Make one factor, not yet filled, that meets `weight` along `weight_dim`.

    Args:
        weight: the layer's weight, which determines dtype, device and split.
        weight_dim: the dim of `weight` that the factor covers.
        lora_rank: length of the factor's other dim.
        rank_dim: index of that other dim: 0 for A, 1 for B.
        sequence_parallel: whether the layer is at the border of a sequence-parallel region: a whole factor then sees
            only part of the sequence, so its gradient is partial, and it is marked like norm weights.
    """
    weight_spec = get_shard_spec(weight)
    if weight_spec is not None and getattr(weight, "partition_dim", None) == weight_dim:
        spec = factor_spec(weight_spec, weight_dim, lora_rank=lora_rank, rank_dim=rank_dim)
        return empty_sharded_parameter(
            spec,
            partition_dim=1 - rank_dim,
            num_partitions=weight.num_partitions,  # type: ignore[attr-defined]
            stride=weight.partition_stride,  # type: ignore[attr-defined]
            dtype=weight.dtype,
            device=weight.device,
        )
    shape = _shape(weight.shape[weight_dim], lora_rank, rank_dim)
    factor = empty_parameter(shape, weight.dtype, weight.device)
    factor.sequence_parallel_enabled = sequence_parallel  # type: ignore[attr-defined]
    return factor


def factor_spec(spec: ShardSpec, weight_dim: int, *, lora_rank: int, rank_dim: int, name: str = "") -> ShardSpec:
    """Return the split of a weight along `weight_dim`, for the factor named `name` (see `ShardPiece.name`)."""
    pieces = [
        replace(
            piece,
            local=_box(piece.local, weight_dim, lora_rank, rank_dim),
            logical=_box(piece.logical, weight_dim, lora_rank, rank_dim),
            logical_shape=_shape(piece.logical_shape[weight_dim], lora_rank, rank_dim),
            name=name,
        )
        for piece in spec.pieces
    ]
    return ShardSpec(_shape(spec.local_shape[weight_dim], lora_rank, rank_dim), tuple(pieces), spec.axis)


def fill_factor(factor: nn.Parameter, logical_length: int, *, rank_dim: int, init_method: InitMethod) -> None:
    """Draw the values of a factor whose covered dim has `logical_length` elements over all ranks."""
    shape = _shape(logical_length, factor.shape[rank_dim], rank_dim)
    spec = get_shard_spec(factor) or shard_along(shape, 0, rank=0, size=1)
    fill_from_logical(factor, spec, shape, init_method)


def _shape(length: int, lora_rank: int, rank_dim: int) -> tuple[int, int]:
    return (lora_rank, length) if rank_dim == 0 else (length, lora_rank)


def _box(box: Box, weight_dim: int, lora_rank: int, rank_dim: int) -> Box:
    offset, length = box.offset[weight_dim], box.shape[weight_dim]
    return Box((0, offset) if rank_dim == 0 else (offset, 0), _shape(length, lora_rank, rank_dim))
