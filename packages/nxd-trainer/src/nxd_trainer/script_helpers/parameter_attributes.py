"""The documented attributes of parameters that are split over tensor-parallel ranks.

They are for scripts that read or copy them. What these packages do follows from a parameter's `ShardSpec`.
"""

from nxd_state import active_group, copy_parameter_attributes, set_partition_attributes
from torch import Tensor


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int = 1, num_partitions: int | None = None
) -> None:
    """Say of a tensor how it is split.

    Args:
        tensor: is given the attributes.
        is_parallel: whether it is split.
        dim: along which dim.
        stride: matrices that are fused along it.
        num_partitions: ranks that share it; all tensor-parallel ones if None.
    """
    ranks = active_group("tp").size if num_partitions is None else num_partitions
    set_partition_attributes(tensor, partition_dim=dim, num_partitions=ranks, stride=stride)
    tensor.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Give a tensor the attributes (and the shard metadata) of another of its shape."""
    copy_parameter_attributes(source_tensor, destination_tensor)


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Whether this rank is to count a parameter: it has a part of its own, or is the first that has it whole."""
    return bool(getattr(param, "tensor_model_parallel", False)) or active_group("tp").rank == 0
