"""The autograd regions of a parallel model with the arguments of NeuronX Distributed, and further ones of it."""

from typing import Literal

import nxd_layers
import torch
from nxd_layers import reduce_scatter_to_sequence_parallel_region
from nxd_layers.mappings import GivenGroup, process_group_as
from nxd_state import reduce_scatter
from torch import Tensor


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, dim: int | GivenGroup = -1, process_group: GivenGroup = None
) -> Tensor:
    """See `nxd_layers.scatter_to_tensor_model_parallel_region`; the process group may stand in the place of `dim`."""
    dim, process_group = _dim_and_group(dim, process_group)
    return nxd_layers.scatter_to_tensor_model_parallel_region(input_, dim, process_group)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, dim: int | GivenGroup = -1, process_group: GivenGroup = None
) -> Tensor:
    """See `nxd_layers.gather_from_tensor_model_parallel_region`; the process group may stand in the place of `dim`."""
    dim, process_group = _dim_and_group(dim, process_group)
    return nxd_layers.gather_from_tensor_model_parallel_region(input_, dim, process_group)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: GivenGroup = None,
    tile_cc: bool = False,
) -> Tensor:
    """See `nxd_layers.gather_from_sequence_parallel_region`.

    Args:
        tile_cc: accepted without effect: this library chooses how collectives are cut.
    """
    return nxd_layers.gather_from_sequence_parallel_region(input_, sequence_dimension, to_model_parallel, process_group)


def _dim_and_group(dim: int | GivenGroup, process_group: GivenGroup) -> tuple[int, GivenGroup]:
    if isinstance(dim, int):
        return dim, process_group
    return -1, dim if process_group is None else process_group


def reduce_scatter_to_tensor_model_parallel_region_with_dim(
    input_: Tensor, partition_dim: int, process_group: GivenGroup = None
) -> Tensor:
    """Partial sums to their sum, split along a dim; gradients are gathered."""
    return reduce_scatter_to_sequence_parallel_region(input_, partition_dim, process_group)


def gather_from_tensor_model_parallel_region_with_dim(
    input_: Tensor, gather_dim: int, process_group: GivenGroup = None
) -> Tensor:
    """Split along a dim to whole; each rank keeps its part of the gradient."""
    return gather_from_sequence_parallel_region(input_, gather_dim, False, process_group)


def split_along_first_dim(input_: Tensor, process_group: GivenGroup = None) -> Tensor:
    """This rank's part of a tensor along dim 0, for autograd functions of scripts."""
    return scatter_to_tensor_model_parallel_region(input_, 0, process_group)


def gather_along_first_dim(x: Tensor, process_group: GivenGroup = None) -> Tensor:
    """The ranks' parts, one after the other along dim 0, for autograd functions of scripts."""
    return gather_from_tensor_model_parallel_region_with_dim(x, 0, process_group)


def reduce_scatter_along_dim(
    x: Tensor, partition_dim: int, computation: Literal["sum", "max"] = "sum", process_group: GivenGroup = None
) -> Tensor:
    """This rank's part of the ranks' sum, or "max", along a dim; without a gradient, for autograd functions.

    Inference takes the "max" of equal tensors for their scatter, in a graph that all ranks share.
    """
    with torch.no_grad():
        return reduce_scatter(x, process_group_as(process_group), dim=partition_dim, op=computation)


def scatter_to_process_group_spmd(
    input_: Tensor, partition_dim: int, rank: Tensor, process_group: GivenGroup = None
) -> Tensor:
    """The part of a tensor that belongs to a rank that is data, so that all ranks record one graph.

    Args:
        input_: whole.
        partition_dim: the dim that is cut.
        rank: `[1]` integer.
        process_group: process group whose ranks split it; the tensor-parallel group if None.

    Raises:
        ValueError: the ranks do not divide the dim.
    """
    length = _part_length(input_, partition_dim, process_group)
    indices = torch.arange(length, device=input_.device) + rank.view(1) * length
    return input_.index_select(partition_dim, indices)


def _part_length(input_: Tensor, dim: int, process_group: GivenGroup) -> int:
    size = process_group_as(process_group).size
    if input_.shape[dim] % size:
        raise ValueError(f"{size} ranks do not divide dim {dim} of shape {tuple(input_.shape)}; pad it first")
    return input_.shape[dim] // size
