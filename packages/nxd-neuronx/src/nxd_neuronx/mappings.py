"""The autograd mappings of nxd_layers with the arguments of NeuronX Distributed, and mappings that only it has."""

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
    """See `nxd_layers.scatter_to_tensor_model_parallel_region`; `dim` may also be the process group."""
    dim, process_group = _dim_and_group(dim, process_group)
    return nxd_layers.scatter_to_tensor_model_parallel_region(input_, dim, process_group)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, dim: int | GivenGroup = -1, process_group: GivenGroup = None
) -> Tensor:
    """See `nxd_layers.gather_from_tensor_model_parallel_region`; `dim` may also be the process group."""
    dim, process_group = _dim_and_group(dim, process_group)
    return nxd_layers.gather_from_tensor_model_parallel_region(input_, dim, process_group)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: GivenGroup = None,
    tile_cc: bool = False,
) -> Tensor:
    """See `nxd_layers.gather_from_sequence_parallel_region`; `tile_cc` is accepted without effect."""
    return nxd_layers.gather_from_sequence_parallel_region(input_, sequence_dimension, to_model_parallel, process_group)


def _dim_and_group(dim: int | GivenGroup, process_group: GivenGroup) -> tuple[int, GivenGroup]:
    if isinstance(dim, int):
        return dim, process_group
    return -1, dim if process_group is None else process_group


def reduce_scatter_to_tensor_model_parallel_region_with_dim(
    input_: Tensor, partition_dim: int, process_group: GivenGroup = None
) -> Tensor:
    """Reduce-scatter partial sums along a dim; gradients are gathered."""
    return reduce_scatter_to_sequence_parallel_region(input_, partition_dim, process_group)


def gather_from_tensor_model_parallel_region_with_dim(
    input_: Tensor, gather_dim: int, process_group: GivenGroup = None
) -> Tensor:
    """Gather along a dim; each rank keeps its part of the gradient."""
    return gather_from_sequence_parallel_region(input_, gather_dim, False, process_group)


def split_along_first_dim(input_: Tensor, process_group: GivenGroup = None) -> Tensor:
    """Return this rank's part of a tensor along dim 0."""
    return scatter_to_tensor_model_parallel_region(input_, 0, process_group)


def gather_along_first_dim(x: Tensor, process_group: GivenGroup = None) -> Tensor:
    """Concatenate the ranks' parts along dim 0."""
    return gather_from_tensor_model_parallel_region_with_dim(x, 0, process_group)


def reduce_scatter_along_dim(
    x: Tensor, partition_dim: int, computation: Literal["sum", "max"] = "sum", process_group: GivenGroup = None
) -> Tensor:
    """Return this rank's part, along a dim, of the sum or maximum over ranks, without a gradient.

    The maximum of equal tensors is their scatter, in a graph that is the same on all ranks.
    """
    with torch.no_grad():
        return reduce_scatter(x, process_group_as(process_group), dim=partition_dim, op=computation)


def scatter_to_process_group_spmd(
    input_: Tensor, partition_dim: int, rank: Tensor, process_group: GivenGroup = None
) -> Tensor:
    """Return the part of a tensor for a rank given as data, so that all ranks record the same graph.

    Args:
        input_: the whole tensor.
        partition_dim: the dim to split.
        rank: `[1]` integer.
        process_group: the process group over whose ranks to split; the tensor-parallel group if None.

    Raises:
        ValueError: the number of ranks does not divide the dim.
    """
    size, shape = process_group_as(process_group).size, tuple(input_.shape)
    if shape[partition_dim] % size:
        raise ValueError(f"{size} ranks do not divide dim {partition_dim} of shape {shape}; pad it first")
    length = shape[partition_dim] // size
    indices = torch.arange(length, device=input_.device) + rank.view(1) * length
    return input_.index_select(partition_dim, indices)
