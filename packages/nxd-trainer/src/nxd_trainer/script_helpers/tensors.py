"""Cutting and moving tensors."""

from typing import Any

from nxd_layers import divide
from torch import Tensor
from torch.utils._pytree import tree_map


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts of a tensor.

    Args:
        tensor: what to cut.
        dim: along which dim.
        num_partitions: number of parts.
        contiguous_split_chunks: copy each part into memory of its own.

    Raises:
        ValueError: the number of parts does not divide the length.
    """
    chunks = tensor.split(divide(tensor.shape[dim], num_partitions), dim=dim)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else chunks


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """`split_tensor_along_dim` for the last dim."""
    return split_tensor_along_dim(tensor, -1, num_partitions, contiguous_split_chunks)


def move_all_tensor_to_cpu(data: Any) -> Any:
    """The same nested lists, tuples and dicts with every tensor on the CPU."""
    return tree_map(lambda value: value.detach().cpu() if isinstance(value, Tensor) else value, data)
