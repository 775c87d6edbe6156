"""Small functions on tensors and on the attributes of sharded ones, which scripts for NeuronX Distributed import."""

from collections.abc import Sequence
from typing import Any

import torch
from nxd_layers import divide
from nxd_state import active_group, set_partition_attributes
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
    """Say of a tensor how it is split.

    Args:
        tensor: is given the attributes.
        is_parallel: whether it is split.
        dim: along which dim.
        stride: matrices that are fused along it.
        num_partitions: ranks that share it; all tensor-parallel ones if None or -1.
        rank_ordering: which part each rank holds; kept as an attribute, for `create_local_weight` of the caller.

    Raises:
        ValueError: `rank_ordering` is no permutation of the ranks.
    """
    ranks = active_group("tp").size if num_partitions in (None, -1) else int(num_partitions or 0)
    if rank_ordering is not None and sorted(rank_ordering) != list(range(ranks)):
        raise ValueError(f"rank_ordering={list(rank_ordering)} must name each of the ranks 0..{ranks - 1} once")
    set_partition_attributes(tensor, partition_dim=dim, num_partitions=ranks, stride=stride)
    tensor.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]
    tensor.rank_ordering = rank_ordering  # type: ignore[attr-defined]


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Whether this rank is to count a parameter: it has a part of its own, or is the first that has it whole."""
    return bool(getattr(param, "tensor_model_parallel", False)) or active_group("tp").rank == 0


class EmbeddingUtility:
    """The tokens of each rank's part of a vocabulary: from the first one to before the last one."""

    @staticmethod
    def range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """From the length of a part."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """From the size of the vocabulary, which the number of ranks must divide."""
        each = divide(global_vocab_size, world_size)
        return EmbeddingUtility.range_from_per_partition_vocab_size(each, rank, world_size)


def get_padding_length(numerator: int, denominator: int) -> int:
    """What is missing to the next multiple of the denominator."""
    return -numerator % denominator


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts of a tensor.

    Args:
        tensor: the tensor to split.
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


def indices_split_along_dim(tensor: Tensor | None, dim: int, rank: int, num_partitions: int) -> Tensor | None:
    """The indices along `dim` of a rank's equal part, int64; None for no tensor.

    Raises:
        ValueError: the number of parts does not divide the length.
    """
    if tensor is None:
        return None
    length = divide(tensor.shape[dim], num_partitions)
    return torch.arange(rank * length, (rank + 1) * length, device=tensor.device)


@torch.no_grad()
def create_local_weight(
    full_weight: Tensor,
    partition_dim: int,
    per_partition_size: int,
    stride: int,
    out_weight: Tensor | None = None,
) -> Tensor:
    """This tensor-parallel rank's part of a whole tensor.

    Args:
        full_weight: the whole one.
        partition_dim: the dim that is cut.
        per_partition_size: length of a part.
        stride: matrices fused along the dim, each of which is cut.
        out_weight: gets the part, if it is given.

    Raises:
        ValueError: `stride` does not divide the part.
    """
    group = active_group("tp")
    chunks = full_weight.split(divide(per_partition_size, stride), dim=partition_dim)
    part = torch.cat(chunks[group.rank :: group.size], dim=partition_dim)
    return part if out_weight is None else out_weight.copy_(part)


def invoke_preshard_hooks(module: nn.Module, model_state_dict: dict[str, Any], prefix: str = "") -> None:
    """Have modules with a `preshard_hook(state, name)` change whole tensors before they are cut.

    Args:
        module: the model; hooks of modules inside one that has a hook are its own business.
        model_state_dict: whole tensors by name, changed in place.
        prefix: prefix of the module's names in it, ending in a dot. A hook's `name` is this and "weight"; a module
            whose `add_bias` is true is requested "bias" as well.
    """
    if callable(hook := getattr(module, "preshard_hook", None)):
        for name in ("weight", "bias") if getattr(module, "add_bias", False) else ("weight",):
            hook(model_state_dict, f"{prefix}{name}")
        return
    for name, child in module.named_children():
        invoke_preshard_hooks(child, model_state_dict, f"{prefix}{name}.")


def cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """The arguments, with floating-point tensors but float64 in autocast's dtype where autocast is on."""

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == torch.float64:
            return value
        kind = value.device.type
        return value.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else value

    return tuple(tree_map(cast, list(args)))


def verify_casted_dtype(value: Any) -> None:
    """Raise a ValueError for a floating-point tensor that `cast_if_autocast_enabled` would change."""
    (cast,) = cast_if_autocast_enabled(value)

    def compare(given: Any, wanted: Any) -> None:
        if isinstance(given, Tensor) and given.dtype != wanted.dtype:
            raise ValueError(f"a tensor is {given.dtype} under autocast; cast it to {wanted.dtype} first")

    tree_map(compare, value, cast)


def move_all_tensor_to_cpu(data: Any, convert: bool = True) -> Any:
    """The same nested lists, tuples and dicts with every tensor on the CPU; as they are without `convert`."""
    if not convert:
        return data
    return tree_map(lambda value: value.detach().cpu() if isinstance(value, Tensor) else value, data)


def is_torch_version_greater_than_2() -> bool:
    """Whether torch is of version 2 or later."""
    return int(torch.__version__.partition(".")[0]) >= 2


def requires_init_pg_override() -> bool:
    """Whether torch is of version 2.0, whose process groups on XLA needed help."""
    return torch.__version__.startswith("2.0.")
