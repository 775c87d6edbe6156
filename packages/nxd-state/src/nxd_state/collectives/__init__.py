"""Collectives on a `Group`: the one way ranks exchange tensors in these packages.

Every function takes a tensor and a group, leaves its input as it was, and returns a new tensor, except those
that end in an underscore, which work in place. A group of one costs nothing: the tensor itself comes back. Inputs
may be non-contiguous and of any dtype (reductions: of any that the transport can add). With `async_op=True` a
`Pending` comes back at once; its `wait()` gives the tensor. Results carry no gradient: the differentiable forms
are the regions of nxd_layers. Messages between two ranks are in `point_to_point`.

Behind this line sits memory that the ranks of one host share (`nxd_state.shared_memory`, for CPU tensors), or
torch.distributed (`c10d`), or torch-xla (`xla`), or, while torch.compile or torch.export records a graph, its
functional collectives (`functional`). With `NXD_DEBUG_COLLECTIVES=1` the ranks first agree on what they are
about to do (`debug`).
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor

from nxd_state.collectives import c10d, debug, functional, xla
from nxd_state.collectives.abort import abort_group
from nxd_state.collectives.c10d import Pending, ReduceOp
from nxd_state.collectives.messages import Receive, Send
from nxd_state.collectives.point_to_point import batch_isend_irecv, check_index, irecv, isend, recv, send
from nxd_state.collectives.shared import pending_of, shared_memory_of
from nxd_state.group import Group
from nxd_state.shard_spec import checked_dim

__all__ = [
    "Pending",
    "Receive",
    "ReduceOp",
    "Send",
    "abort_group",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced_",
    "all_to_all",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "send",
]


def _announce(name: str, group: Group, tensor: Tensor | None = None, **details: Any) -> None:
    if debug.enabled():
        debug.agree(name, group, tensor, details)


@overload
def all_reduce(tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce(tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: Literal[True]) -> Pending: ...
def all_reduce(tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: bool = False) -> Tensor | Pending:
    """Combine the ranks' tensors elementwise; every rank gets the result, in a new tensor.

    Raises:
        ValueError: no such `op`, or an average of integers.
    """
    _check_op(op, tensor)
    if group.size == 1:
        return Pending(tensor) if async_op else tensor
    if torch.compiler.is_compiling():
        reduced = functional.all_reduce(tensor, group, op)
        return Pending(reduced) if async_op else reduced
    memory = None if async_op else shared_memory_of(tensor, group)
    if memory is not None:
        _announce("all_reduce", group, tensor, op=op)
        return memory.all_reduce(tensor, op)
    if tensor.device.type == "xla":
        _announce("all_reduce", group, tensor, op=op)
        reduced = xla.all_reduce(tensor, group, op)
        return Pending(reduced) if async_op else reduced
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return all_reduce_(copy, group, op=op, async_op=async_op)


@overload
def all_reduce_(tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce_(tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: Literal[True]) -> Pending: ...
@overload
def all_reduce_(tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: bool = False) -> Tensor | Pending: ...
def all_reduce_(tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: bool = False) -> Tensor | Pending:
    """`all_reduce` that writes into `tensor` itself, for buffers and temporaries that nobody else reads."""
    _check_op(op, tensor)
    if group.size == 1:
        return Pending(tensor) if async_op else tensor
    if torch.compiler.is_compiling():
        reduced = tensor.copy_(functional.all_reduce(tensor, group, op))
        return Pending(reduced) if async_op else reduced
    _announce("all_reduce", group, tensor, op=op)
    if tensor.device.type == "xla":
        xla.all_reduce_(tensor, group, op)
        return Pending(tensor) if async_op else tensor
    memory = shared_memory_of(tensor, group)
    if memory is not None:
        return pending_of(tensor, memory.begin_all_reduce_(tensor, op)) if async_op else memory.all_reduce_(tensor, op)
    pending = c10d.all_reduce_(tensor, group, op)
    return pending if async_op else pending.wait()


def all_reduce_coalesced_(tensors: Sequence[Tensor], group: Group, *, op: ReduceOp = "sum") -> None:
    """`all_reduce_` of several tensors of one dtype: on XLA one operation of the graph, elsewhere one after the other.

    Raises:
        ValueError: no such `op`, or an average of integers.
    """
    for tensor in tensors:
        _check_op(op, tensor)
    if group.size == 1 or not tensors:
        return
    if tensors[0].device.type == "xla" and not torch.compiler.is_compiling():
        _announce("all_reduce_coalesced", group, tensors[0], op=op)
        xla.all_reduce_coalesced_(list(tensors), group, op)
        return
    for tensor in tensors:
        all_reduce_(tensor, group, op=op)


@overload
def all_gather(tensor: Tensor, group: Group, *, dim: int = 0, async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_gather(tensor: Tensor, group: Group, *, dim: int = 0, async_op: Literal[True]) -> Pending: ...
def all_gather(tensor: Tensor, group: Group, *, dim: int = 0, async_op: bool = False) -> Tensor | Pending:
    """Concatenate the ranks' tensors, which have one shape, along `dim` in group order.

    Raises:
        ValueError: the tensor has no such `dim`.
    """
    dim = checked_dim(dim, tensor.shape)
    if group.size == 1:
        return Pending(tensor) if async_op else tensor
    if torch.compiler.is_compiling():
        gathered = functional.all_gather(tensor, group, dim)
        return Pending(gathered) if async_op else gathered
    _announce("all_gather", group, tensor, dim=dim)
    if tensor.device.type == "xla":
        gathered = xla.all_gather(tensor, group, dim)
        return Pending(gathered) if async_op else gathered
    memory = shared_memory_of(tensor, group)
    if memory is not None:
        return pending_of(tensor, memory.begin_all_gather(tensor, dim)) if async_op else memory.all_gather(tensor, dim)
    pending = c10d.all_gather(tensor, group, dim)
    return pending if async_op else pending.wait()


@overload
def reduce_scatter(
    tensor: Tensor, group: Group, *, dim: int = 0, op: ReduceOp = "sum", async_op: Literal[False] = False
) -> Tensor: ...
@overload
def reduce_scatter(
    tensor: Tensor, group: Group, *, dim: int = 0, op: ReduceOp = "sum", async_op: Literal[True]
) -> Pending: ...
def reduce_scatter(
    tensor: Tensor, group: Group, *, dim: int = 0, op: ReduceOp = "sum", async_op: bool = False
) -> Tensor | Pending:
    """Combine the ranks' tensors and keep this rank's equal part along `dim`.

    Raises:
        ValueError: the group's size does not divide `tensor.shape[dim]`; no such `op`, or an average of integers.
    """
    _check_op(op, tensor)
    dim = checked_dim(dim, tensor.shape)
    _check_divides(tensor, dim, group)
    if group.size == 1:
        return Pending(tensor) if async_op else tensor
    if torch.compiler.is_compiling():
        scattered = functional.reduce_scatter(tensor, group, dim, op)
        return Pending(scattered) if async_op else scattered
    _announce("reduce_scatter", group, tensor, dim=dim, op=op)
    if tensor.device.type == "xla":
        scattered = xla.reduce_scatter(tensor, group, dim, op)
        return Pending(scattered) if async_op else scattered
    memory = shared_memory_of(tensor, group)
    if memory is not None and async_op:
        return pending_of(tensor, memory.begin_reduce_scatter(tensor, dim, op))
    if memory is not None:
        return memory.reduce_scatter(tensor, dim, op)
    pending = c10d.reduce_scatter(tensor, group, dim, op)
    return pending if async_op else pending.wait()


def all_to_all(tensor: Tensor, group: Group, *, split_dim: int, concat_dim: int) -> Tensor:
    """Cut `tensor` along `split_dim` into one part per rank; concatenate what the ranks send along `concat_dim`.

    Raises:
        ValueError: the group's size does not divide `tensor.shape[split_dim]`.
    """
    split_dim, concat_dim = checked_dim(split_dim, tensor.shape), checked_dim(concat_dim, tensor.shape)
    _check_divides(tensor, split_dim, group)
    if group.size == 1:
        return tensor
    if torch.compiler.is_compiling():
        return functional.all_to_all(tensor, group, split_dim, concat_dim)
    _announce("all_to_all", group, tensor, split_dim=split_dim, concat_dim=concat_dim)
    if tensor.device.type == "xla":
        return xla.all_to_all(tensor, group, split_dim, concat_dim)
    memory = shared_memory_of(tensor, group)
    if memory is not None:
        return memory.all_to_all(tensor, split_dim, concat_dim)
    return c10d.all_to_all(tensor, group, split_dim, concat_dim)


def broadcast(tensor: Tensor, group: Group, *, source: int = 0) -> Tensor:
    """The tensor of the rank with index `source` in the group, on every rank; inputs give shape and dtype.

    Raises:
        ValueError: the group has no such index.
    """
    check_index("source", source, group)
    if group.size == 1:
        return tensor
    if torch.compiler.is_compiling():
        return functional.broadcast(tensor, group, source)
    _announce("broadcast", group, tensor, source=source)
    if tensor.device.type == "xla":
        return xla.broadcast(tensor, group, source)
    memory = shared_memory_of(tensor, group)
    if memory is not None:
        return memory.broadcast(tensor, source)
    return c10d.broadcast(tensor, group, source)


def barrier(group: Group) -> None:
    """Return once every rank of the group has come here."""
    if group.size > 1:
        _announce("barrier", group)
        if group.shared_memory is not None:
            group.shared_memory.barrier()
        else:
            c10d.barrier(group)


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """Every rank's (picklable, small) Python value, in group order: for plans and error reports, not for data."""
    if group.size == 1:
        return [value]
    _announce("all_gather_object", group)
    if group.shared_memory is not None:
        return group.shared_memory.all_gather_object(value)
    return c10d.all_gather_object(value, group)


def _check_op(op: str, tensor: Tensor) -> None:
    if op not in get_args(ReduceOp):
        raise ValueError(f"op={op!r} is not a reduction; use one of {', '.join(get_args(ReduceOp))}")
    if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"op='avg' of {tensor.dtype} has no result of that dtype; use op='sum' or convert to float")


def _check_divides(tensor: Tensor, dim: int, group: Group) -> None:
    if tensor.shape[dim] % group.size:
        raise ValueError(
            f"{group} of {group.size} ranks does not divide dim {dim} of shape {tuple(tensor.shape)}; "
            f"pad it to {-(-tensor.shape[dim] // group.size) * group.size}"
        )
