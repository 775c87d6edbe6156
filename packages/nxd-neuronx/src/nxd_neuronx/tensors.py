"""Small functions on tensors and on the attributes of sharded tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from nxd_layers import divide
from nxd_state import active_group, set_partition_attributes
from nxd_state.parameter_marks import is_tensor_parallel
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def set_tensor_model_parallel_attributes(
    tensor: Tensor,
    is_parallel: bool,
    dim: int,
    stride: int = 1,
    num_partitions: int | None = None,
    rank_ordering: Sequence[int] | None = None,
) -> None:
    """Set the attributes that describe how a tensor is split.

    Args:
        tensor: the tensor.
        is_parallel: whether it is split.
        dim: the split dim.
        stride: number of matrices fused along the dim.
        num_partitions: number of ranks that share it; all tensor-parallel ranks if None or -1.
        rank_ordering: the part of each rank, stored as an attribute.

    Raises:
        ValueError: `rank_ordering` is not a permutation of the ranks.
    """
    ranks = active_group("tp").size if num_partitions in (None, -1) else int(num_partitions or 0)
    if rank_ordering is not None and sorted(rank_ordering) != list(range(ranks)):
        raise ValueError(f"rank_ordering={list(rank_ordering)} must name each of the ranks 0..{ranks - 1} once")
    set_partition_attributes(tensor, partition_dim=dim, num_partitions=ranks, stride=stride)
    tensor.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]
    tensor.rank_ordering = rank_ordering  # type: ignore[attr-defined]


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Return whether this rank counts a parameter: it is split, or this is the first of the ranks that replicate it."""
    return is_tensor_parallel(param) or active_group("tp").rank == 0


class EmbeddingUtility:
    """Ranges `[first, last)` of the token ids in each rank's part of a vocabulary."""

    @staticmethod
    def range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the range, given the length of a part."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return the range, given the size of the vocabulary, which the number of ranks must divide."""
        each = divide(global_vocab_size, world_size)
        return EmbeddingUtility.range_from_per_partition_vocab_size(each, rank, world_size)


def get_padding_length(numerator: int, denominator: int) -> int:
    """Return how much to add to reach the next multiple of the denominator."""
    return -numerator % denominator


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor into equal parts along a dim; `contiguous_split_chunks` copies each part.

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


@torch.no_grad()
def create_local_weight(
    full_weight: Tensor,
    partition_dim: int,
    per_partition_size: int,
    stride: int,
    out_weight: Tensor | None = None,
) -> Tensor:
    """Return this tensor-parallel rank's part of a whole tensor.

    Args:
        full_weight: the whole tensor.
        partition_dim: the split dim.
        per_partition_size: length of a part.
        stride: number of matrices fused along the dim, each of which is split.
        out_weight: tensor to copy the part into, or None.

    Raises:
        ValueError: `stride` does not divide the part.
    """
    group = active_group("tp")
    chunks = full_weight.split(divide(per_partition_size, stride), dim=partition_dim)
    part = torch.cat(chunks[group.rank :: group.size], dim=partition_dim)
    return part if out_weight is None else out_weight.copy_(part)


def invoke_preshard_hooks(module: nn.Module, model_state_dict: dict[str, Any], prefix: str = "") -> None:
    """Call `preshard_hook(state, name)` of modules that have one, to change whole tensors before they are sharded.

    Args:
        module: the model; modules inside a module with a hook are skipped.
        model_state_dict: whole tensors by name, changed in place.
        prefix: prefix of the module's names, ending in a dot. A hook's `name` is the prefix and "weight", and "bias"
            too if the module's `add_bias` is true.
    """
    if callable(hook := getattr(module, "preshard_hook", None)):
        for name in ("weight", "bias") if getattr(module, "add_bias", False) else ("weight",):
            hook(model_state_dict, f"{prefix}{name}")
        return
    for name, child in module.named_children():
        invoke_preshard_hooks(child, model_state_dict, f"{prefix}{name}.")


def move_all_tensor_to_cpu(data: Any, convert: bool = True) -> Any:
    """Move the tensors in nested lists, tuples and dicts to the CPU; return `data` itself without `convert`."""
    if not convert:
        return data
    return tree_map(lambda value: value.detach().cpu() if isinstance(value, Tensor) else value, data)


def requires_init_pg_override() -> bool:
    """Return whether this is torch 2.0, whose process groups on XLA need an override."""
    return torch.__version__.startswith("2.0.")
