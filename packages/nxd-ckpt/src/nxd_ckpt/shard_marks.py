"""The protocol by which tensors describe which part of a whole they are, and other libraries' marks that do not.

A tensor that is a part has an attribute `shard_spec` with `pieces`. Each piece has boxes `local` (in the tensor) and
`logical` (in the whole), both with `offset` and `shape`, the `logical_shape` of the whole, and its `name`: "" for the
tensor's own, otherwise relative to the parent of the module that owns the tensor. Elements in no piece are padding.
With several ranks, a tensor with another mark of a part, or of an unknown subclass, is refused, since it is unknown
which part it is.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nxd_ckpt.boxes import Box
from nxd_ckpt.distributed_tensors import is_dtensor, is_subclass
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor

# Attributes that mark parts in Megatron and its forks, fairscale, ColossalAI, DeepSpeed and FSDP1.
_MARKS = (
    "tensor_model_parallel",
    "expert_model_parallel",
    "model_parallel",
    "_is_sharded",
    "dist_layout",
    "ds_tensor",
    "_is_flat_param",
)
# Classes that hold all of their elements and have no other state.
_PLAIN_CLASSES = (torch.Tensor, nn.Parameter)
_PLAIN_PACKAGES = ("bitsandbytes",)  # weights quantized equally on each rank; their other tensors are in the state_dict


def is_part(tensor: Any) -> bool:
    """Whether a tensor has a spec or a mark of a part; DTensors are handled separately."""
    return _spec_of(tensor) is not None or (isinstance(tensor, torch.Tensor) and _foreign_mark(tensor) is not None)


def logical_parts(tensor: torch.Tensor, name: str, like: Any = None) -> dict[str, ShardedTensor] | None:
    """Return the boxes of logical tensors in a tensor, by name; None if it is a whole tensor.

    Args:
        tensor: a parameter, or a state of one.
        name: the parameter's name in its module.
        like: the parameter that `tensor` is split like; default: the tensor itself.

    Raises:
        ValueError: the spec is for another shape.
    """
    spec = _spec_of(tensor if like is None else like)
    if spec is None:
        return None
    if tuple(spec.local_shape) != tuple(tensor.shape):
        raise ValueError(
            f"its shard_spec is for a tensor {list(spec.local_shape)}, but its shape is {list(tensor.shape)}; set a "
            "shard_spec for the current shape"
        )
    shards: dict[str, list[Shard]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in spec.pieces:
        full_name = relative_name(name, piece.name)
        shapes[full_name] = tuple(piece.logical_shape)
        part = tensor.detach()[Box(tuple(piece.local.offset), tuple(piece.local.shape)).slices]
        shards.setdefault(full_name, []).append(Shard(part, tuple(piece.logical.offset)))
    return {full_name: ShardedTensor(shapes[full_name], of_name) for full_name, of_name in shards.items()}


def logical_names(tensor: Any, name: str) -> list[str]:
    """Return the names of the logical tensors in a parameter: its own if it is whole; none if it is all padding."""
    spec = _spec_of(tensor)
    return [name] if spec is None else list(dict.fromkeys(relative_name(name, it.name) for it in spec.pieces))


def logical_shape(tensor: Any, name: str, logical: str) -> tuple[int, ...]:
    """Return the shape of one of the logical tensors in a parameter."""
    spec = _spec_of(tensor)
    if spec is None:
        return tuple(tensor.shape)
    return next(tuple(it.logical_shape) for it in spec.pieces if relative_name(name, it.name) == logical)


def is_sharded(tensor: Any) -> bool:
    """Whether a parameter with a spec is anything but one whole logical tensor."""
    spec = _spec_of(tensor)
    return spec is not None and not (
        len(spec.pieces) == 1 and tuple(spec.local_shape) == tuple(spec.pieces[0].logical_shape)
    )


def check_known(tensor: torch.Tensor) -> None:
    """Refuse a tensor without a spec that may be a part. Only for several ranks; a single rank holds whole tensors.

    Raises:
        ValueError: the tensor may be a part; names the mark.
    """
    if is_dtensor(tensor):
        return
    if is_subclass(tensor):
        if is_part(tensor):
            raise ValueError(
                f"a {type(tensor).__name__} {list(tensor.shape)} is marked as a part of another tensor, and it is "
                "unknown how that splits its inner tensors; make it a DTensor"
            )
        return
    if _spec_of(tensor) is not None:
        return
    advice = "pass a nxd_ckpt.ShardedTensor that says which boxes this rank holds, or set its shard_spec"
    if (mark := _foreign_mark(tensor)) is not None:
        raise ValueError(
            f"a tensor {list(tensor.shape)} with {mark} is marked as a part of another, and nothing says which part; "
            f"{advice} (num_partitions = 1 marks a whole tensor)"
        )
    kind = type(tensor)
    if kind not in _PLAIN_CLASSES and kind.__module__.split(".")[0] not in _PLAIN_PACKAGES:
        raise ValueError(
            f"a {kind.__name__} {list(tensor.shape)} may be a part of another tensor; {advice}, or pass its "
            "as_subclass(torch.Tensor) if each rank holds all of it"
        )


def check_layers(named_modules: Callable[[], Iterator[tuple[str, nn.Module]]]) -> None:
    """Refuse modules whose parameters are parts without a spec. Only for several ranks.

    Raises:
        ValueError: a layer's weight has lost its spec, a tensor that belongs to it has none, or the module is an FSDP1
            module.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(
                f"{name or 'it'} is FullyShardedDataParallel, whose flat parameters do not say what they hold; use "
                "fully_shard (FSDP2), or pass the results of FSDP.state_dict() and FSDP.optim_state_dict()"
            )
        degree = getattr(module, "tensor_parallel_size", 1)
        if not isinstance(degree, int) or degree == 1:
            continue
        for own_name, parameter in module.named_parameters(recurse=False):
            if own_name.startswith("weight") and not is_part(parameter) and not is_dtensor(parameter):
                raise ValueError(
                    f"{name}.{own_name} is split over {degree} ranks but has lost its shard_spec, as copies do "
                    "(deepcopy, to_empty, load_state_dict(assign=True)); copy it from the original parameter"
                )
        for own_name, tensor in _belonging_to_weights(module):
            says_it = is_part(tensor) or is_dtensor(tensor) or getattr(tensor, "num_partitions", None) == 1
            if tensor.numel() > 1 and not says_it:
                raise ValueError(
                    f"{name}.{own_name} {list(tensor.shape)} belongs to a weight split over {degree} ranks and does "
                    "not say which part it is; set its shard_spec, or num_partitions = 1 if it is equal on all ranks"
                )


def _belonging_to_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in parametrizations of a split layer's weights, and its buffers of the part's length."""
    for weight, parametrization in getattr(module, "parametrizations", {}).items():
        if weight.startswith("weight"):
            for kept in (parametrization.named_parameters(), parametrization.named_buffers()):
                yield from ((f"parametrizations.{weight}.{name}", tensor) for name, tensor in kept)
    lengths: set[int] = set()
    for name, parameter in module.named_parameters(recurse=False):
        spec = _spec_of(parameter) if name.startswith("weight") else None
        for piece in () if spec is None else spec.pieces:
            lengths |= {own for own, of_all in zip(parameter.shape, piece.logical_shape, strict=True) if own != of_all}
    for name, buffer in module.named_buffers(recurse=False):
        if lengths & set(buffer.shape) and name not in module._non_persistent_buffers_set:
            yield name, buffer


def check_no_copy(tensor: torch.Tensor, name: str, parts: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a bare tensor that seems to be a copy of a part, such as a moving average. Only for several ranks.

    Raises:
        ValueError: it has the name and shape of one of them.
    """
    says_it = is_part(tensor) or is_dtensor(tensor) or getattr(tensor, "num_partitions", None) == 1
    if parts.get(name) == tuple(tensor.shape) and not says_it:
        raise ValueError(
            f"a tensor {list(tensor.shape)} has the name and shape of a parameter that is a part of another, and "
            "nothing says which part it is; set its shard_spec to the parameter's, or num_partitions = 1 if it is whole"
        )


def _spec_of(tensor: Any) -> Any:
    spec = getattr(tensor, "shard_spec", None)
    return spec if hasattr(spec, "pieces") else None


def _foreign_mark(tensor: torch.Tensor) -> str | None:
    """Return the first mark of a part other than `shard_spec`."""
    if getattr(tensor, "num_partitions", None) == 1:
        return None
    for mark in _MARKS:
        value = getattr(tensor, mark, None)
        if value is not None and value is not False:
            dim = getattr(tensor, "partition_dim", None)
            return f"{mark}={value if value is True else type(value).__name__}" + (
                "" if dim is None else f", partition_dim={dim}"
            )
    if getattr(tensor, "allreduce", True) is False:  # experts of Megatron and DeepSpeed
        return "allreduce=False"
    dim = getattr(tensor, "partition_dim", -1)
    if not hasattr(tensor, "tensor_model_parallel") and isinstance(dim, int) and dim >= 0:
        return f"partition_dim={dim}"
    return None


def relative_name(name: str, relative: str) -> str:
    """Return the name of a logical tensor: the parameter's own, or one relative to the parent of its module."""
    if not relative:
        return name
    return ".".join([*name.split(".")[:-2], relative])
