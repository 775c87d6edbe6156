"""Adapters of fused expert weights: a parameter `[experts, out, in]` of one module, with factors for each expert.

How such a module uses its parameters is unknown, so the adapter is in the values that it reads: while its forward runs,
an adapted parameter reads as `W + scale * B A`. As in PEFT (`target_parameters`), this takes the memory of the adapted
weights a second time, for as long as backward needs them, and dropout is not possible.

A rank has the factors of its own experts. If tensor-parallel ranks split each expert, the factor that meets the split
dim is split as well; the other one is whole, and its gradient is summed over these ranks in backward.
"""

from dataclasses import replace
from typing import Any

import torch
from nxd_layers.initialization import InitMethod, empty_parameter, fill_from_logical
from nxd_layers.mappings import copy_to_tensor_model_parallel_region
from nxd_state import (
    Box,
    ShardPiece,
    ShardSpec,
    at_least_float32,
    get_shard_spec,
    set_partition_attributes,
    set_shard_spec,
    shard_along,
)
from nxd_state.parameter_marks import (
    get_partition,
    is_expert,
    is_sequence_parallel,
    mark_expert,
    mark_sequence_parallel,
)
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from nxd_lora.adapter import LayerKind, factor, factor_name, require_adapter, scale_of
from nxd_lora.config import LoraConfig
from nxd_lora.linear import FACTOR_NAMES, init_of_a

_DIMS = 3  # experts, and a matrix for each


def expert_weights(layer: nn.Module) -> list[str]:
    """Return the names of the module's own parameters that can be adapted, in their order."""
    if isinstance(layer, _ConvNd):  # its kernels are not matrices
        return []
    own = layer.named_parameters(recurse=False)
    return [name for name, it in own if it.dim() == _DIMS and it.is_floating_point() and not _is_factor(name)]


def _is_factor(name: str) -> bool:
    return name.startswith(tuple(f"{factor}_" for factor in FACTOR_NAMES))


def matrix_dims(layer: nn.Module) -> tuple[int, int]:
    """Return the dims of outputs and inputs in the weights of a module, as PEFT and transformers define them."""
    return (2, 1) if getattr(layer, "is_transposed", False) else (1, 2)


def _add_factors(layer: nn.Module, config: LoraConfig, part: str) -> None:
    out_dim, in_dim = matrix_dims(layer)
    a = _make_factor(layer, part, in_dim, rank_dim=1, config=config, init_method=init_of_a(config))
    b = _make_factor(layer, part, out_dim, rank_dim=2, config=config, init_method=nn.init.zeros_)
    for name, made in zip(FACTOR_NAMES, (a, b), strict=True):
        layer.register_parameter(factor_name(name, part), made)


def _make_factor(
    layer: nn.Module, part: str, weight_dim: int, *, rank_dim: int, config: LoraConfig, init_method: InitMethod
) -> nn.Parameter:
    """Make A `[experts, r, in]` or B `[experts, out, r]` for a weight; the factor covers its `weight_dim`."""
    weight = layer.get_parameter(part)
    partition = get_partition(weight)
    split_dim = _split_dim(weight)
    if split_dim == 0:
        raise ValueError(
            f"the experts of {type(layer).__name__}.{part} are split over tensor-parallel ranks by whole experts, "
            "which adapters do not support; leave it out of target_parameters"
        )
    weight_spec = get_shard_spec(weight)
    logical = weight.shape if weight_spec is None else weight_spec.pieces[0].logical_shape
    if weight_spec is None:
        spec = shard_along(_shape(logical, weight_dim, rank_dim, config.lora_rank), 0, rank=0, size=1)
    else:
        copies = partition.num_partitions if partition is not None and split_dim not in (None, weight_dim) else 1
        spec = _factor_spec(weight_spec, weight_dim, rank_dim, config.lora_rank, copies)
    made = empty_parameter(spec.local_shape, weight.dtype, weight.device)
    if weight_spec is not None:
        set_shard_spec(made, spec)
    if partition is not None and split_dim == weight_dim:
        count, stride = partition.num_partitions, partition.stride
        set_partition_attributes(made, partition_dim=3 - rank_dim, num_partitions=count, stride=stride)
    if is_expert(weight):
        mark_expert(made)
    mark_sequence_parallel(made, is_sequence_parallel(weight))

    def fill(whole: Tensor) -> None:
        init_method(whole.flatten(0, 1))  # as one matrix, so that fan-in is that of a linear layer

    fill_from_logical(made, spec, _shape(logical, weight_dim, rank_dim, config.lora_rank), fill)
    return made


def _split_dim(weight: nn.Parameter) -> int | None:
    """The dim of a weight that is split over tensor-parallel ranks."""
    partition = get_partition(weight)
    return partition.dim if partition is not None and partition.num_partitions > 1 else None


def _factor_spec(spec: ShardSpec, weight_dim: int, rank_dim: int, lora_rank: int, copies: int) -> ShardSpec:
    """The spec of a factor; `copies` is the number of ranks that share the same part of the factor."""

    def box(of_weight: Box) -> Box:
        offset = [0, 0, 0]
        offset[0], offset[3 - rank_dim] = of_weight.offset[0], of_weight.offset[weight_dim]
        return Box(tuple(offset), _shape(of_weight.shape, weight_dim, rank_dim, lora_rank))

    pieces: dict[tuple[Box, Box], ShardPiece] = {}  # matrices side by side in the other dim share one factor
    for piece in spec.pieces:
        local, logical = box(piece.local), box(piece.logical)
        shape = _shape(piece.logical_shape, weight_dim, rank_dim, lora_rank)
        pieces[local, logical] = replace(
            piece, local=local, logical=logical, logical_shape=shape, copies=piece.copies * copies
        )
    return ShardSpec(_shape(spec.local_shape, weight_dim, rank_dim, lora_rank), tuple(pieces.values()), spec.axis)


def _shape(weight: tuple[int, ...], weight_dim: int, rank_dim: int, lora_rank: int) -> tuple[int, int, int]:
    covered = weight[weight_dim]
    return (weight[0], lora_rank, covered) if rank_dim == 1 else (weight[0], covered, lora_rank)


def _read_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The values of the adapted parameters of a module in its forward."""
    read = {}
    for part in require_adapter(layer).parts:
        weight = layer.get_parameter(part)
        split_dim = _split_dim(weight)
        a, b = (
            # Each rank has a part of the gradient of a factor that all ranks of an expert use whole.
            it if split_dim in (None, covered) else copy_to_tensor_model_parallel_region(it)
            for it, covered in zip(
                (factor(layer, 0, part), factor(layer, 1, part)), reversed(matrix_dims(layer)), strict=True
            )
        )
        read[part] = torch.baddbmm(weight, *_in_order(layer, a, b), alpha=scale_of(layer))
    return read


def _weight_deltas(layer: nn.Module) -> dict[str, Tensor]:
    deltas = {}
    for part in require_adapter(layer).parts:
        a, b = (at_least_float32(layer.get_parameter(factor_name(name, part))) for name in FACTOR_NAMES)
        deltas[part] = scale_of(layer) * torch.bmm(*_in_order(layer, a, b))
    return deltas


def _in_order(layer: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The two factors in the order in which the weight is stored."""
    out_dim, in_dim = matrix_dims(layer)
    return (b, a) if out_dim < in_dim else (a.transpose(1, 2), b.transpose(1, 2))


def _no_biases(layer: nn.Module, parts: Any) -> list[str]:
    return []


EXPERT_WEIGHTS = LayerKind(
    FACTOR_NAMES,
    _add_factors,
    output_delta=None,
    weight_deltas=_weight_deltas,
    parts={},
    bias_names=_no_biases,
    read_weights=_read_weights,
)
