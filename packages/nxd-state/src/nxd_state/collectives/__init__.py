"""Collectives on a `Group`: the one way ranks exchange tensors in these packages.

Every function takes a tensor and a group, leaves its input unchanged, and returns a new tensor, except those
that end in an underscore, which work in place. A group of one costs nothing: the tensor itself comes back. Inputs
may be non-contiguous and of any dtype (reductions: of any that the transport can add). With `async_op=True` a
`Pending` is returned at once; its `wait()` gives the tensor. Results carry no gradient: the differentiable forms
are the regions of nxd_layers. Messages between two ranks are in `point_to_point`.

A transport (see `transport`, picked by `choice`) does the work: memory that the ranks of one host share
(`nxd_state.shared_memory`, for CPU tensors), or torch.distributed (`c10d`), or torch-xla (`xla`), or, while
torch.compile or torch.export records a graph, its functional collectives (`functional`). With
`NXD_DEBUG_COLLECTIVES=1` the ranks first agree on what they are about to do (`debug`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor

from nxd_state.collectives import debug, traffic
from nxd_state.collectives.choice import host_transport_of, transport_of
from nxd_state.collectives.point_to_point import (
    batch_isend_irecv,
    check_index,
    irecv,
    is_plain_memory,
    isend,
    recv,
    send,
)
from nxd_state.collectives.transport import Pending, Receive, ReduceOp, Send, Transport, ready
from nxd_state.group import Group
from nxd_state.rank_failure import abort_group
from nxd_state.shard_spec import checked_dim

__all__ = [
    "Pending",
    "Receive",
    "ReduceOp",
    "Send",
    "abort_group",
    "all_gather",
    "all_gather_",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced_",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "reduce_scatter_mean",
    "send",
]


def _transport(
    name: str, tensor: Tensor, group: Group, *, num_bytes: Callable[[], int] | None = None, **details: Any
) -> Transport:
    """The tensor's transport, once the collective is counted; in debug mode, once all ranks have announced the same.

    `num_bytes` gives the bytes that `traffic.note` counts, if they are not the tensor's.
    """
    if not torch.compiler.is_compiling():
        if debug.enabled():
            debug.wait_for_agreement(name, group, tensor, details)
        if traffic.is_counted():
            traffic.note(name, group, tensor.nbytes if num_bytes is None else num_bytes())
    return transport_of(tensor, group)


@overload
def all_reduce(tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce(tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: Literal[True]) -> Pending[Tensor]: ...
def all_reduce(
    tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: bool = False
) -> Tensor | Pending[Tensor]:
    """Combine the ranks' tensors elementwise; every rank gets the result, in a new tensor.

    Raises:
        ValueError: no such `op`, or an average of integers.
    """
    _check_op(op, tensor)
    if group.size == 1:
        return ready(tensor, async_op=async_op)
    return _transport("all_reduce", tensor, group, op=op).all_reduce(tensor, op, async_op=async_op)


@overload
def all_reduce_(tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce_(tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: Literal[True]) -> Pending[Tensor]: ...
def all_reduce_(
    tensor: Tensor, group: Group, *, op: ReduceOp = "sum", async_op: bool = False
) -> Tensor | Pending[Tensor]:
    """`all_reduce` that writes into `tensor` itself, for buffers and temporaries without other readers."""
    _check_op(op, tensor)
    if group.size == 1:
        return ready(tensor, async_op=async_op)
    return _transport("all_reduce", tensor, group, op=op).all_reduce_(tensor, op, async_op=async_op)


def all_reduce_coalesced_(tensors: Sequence[Tensor], group: Group, *, op: ReduceOp = "sum") -> None:
    """`all_reduce_` of several tensors of one dtype: on XLA one operation of the graph, elsewhere one after the other.

    Raises:
        ValueError: no such `op`, or an average of integers.
    """
    for tensor in tensors:
        _check_op(op, tensor)
    if group.size > 1 and tensors:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        transport = _transport(
            "all_reduce_coalesced",
            tensors[0],
            group,
            num_bytes=lambda: sum(tensor.nbytes for tensor in tensors),
            op=op,
            shapes=shapes,
        )
        transport.all_reduce_coalesced_(tensors, op)


@overload
def all_gather(tensor: Tensor, group: Group, *, dim: int = 0, async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_gather(tensor: Tensor, group: Group, *, dim: int = 0, async_op: Literal[True]) -> Pending[Tensor]: ...
def all_gather(tensor: Tensor, group: Group, *, dim: int = 0, async_op: bool = False) -> Tensor | Pending[Tensor]:
    """Concatenate the ranks' tensors, which have one shape, along `dim` in group order.

    Raises:
        ValueError: the tensor has no such `dim`.
    """
    dim = checked_dim(dim, tensor.shape)
    if group.size == 1:
        return ready(tensor, async_op=async_op)
    return _transport("all_gather", tensor, group, dim=dim).all_gather(tensor, dim, async_op=async_op)


@overload
def all_gather_(tensor: Tensor, group: Group, *, async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_gather_(tensor: Tensor, group: Group, *, async_op: Literal[True]) -> Pending[Tensor]: ...
def all_gather_(tensor: Tensor, group: Group, *, async_op: bool = False) -> Tensor | Pending[Tensor]:
    """Fill `tensor` with the ranks' equal parts along dim 0, in group order; this rank's part is in it already.

    On the CPU the parts go as messages of the group: no `isend` or `irecv` of it may be under way meanwhile.

    Raises:
        ValueError: `tensor` is not contiguous, has no dim, or the group's size does not divide `tensor.shape[0]`.
    """
    _check_divides(tensor, checked_dim(0, tensor.shape), group)
    if not is_plain_memory(tensor):
        raise ValueError(
            f"cannot gather into a non-contiguous tensor of shape {tuple(tensor.shape)} (or a conjugate view); "
            "gather into a contiguous one"
        )
    if group.size == 1:
        return ready(tensor, async_op=async_op)
    return _transport("all_gather_", tensor, group).all_gather_(tensor, async_op=async_op)


@overload
def reduce_scatter(
    tensor: Tensor, group: Group, *, dim: int = 0, op: ReduceOp = "sum", async_op: Literal[False] = False
) -> Tensor: ...
@overload
def reduce_scatter(
    tensor: Tensor, group: Group, *, dim: int = 0, op: ReduceOp = "sum", async_op: Literal[True]
) -> Pending[Tensor]: ...
def reduce_scatter(
    tensor: Tensor, group: Group, *, dim: int = 0, op: ReduceOp = "sum", async_op: bool = False
) -> Tensor | Pending[Tensor]:
    """Combine the ranks' tensors and keep this rank's equal part along `dim`.

    Raises:
        ValueError: the group's size does not divide `tensor.shape[dim]`; no such `op`, or an average of integers.
    """
    _check_op(op, tensor)
    dim = checked_dim(dim, tensor.shape)
    _check_divides(tensor, dim, group)
    if group.size == 1:
        return ready(tensor, async_op=async_op)
    transport = _transport("reduce_scatter", tensor, group, dim=dim, op=op)
    return transport.reduce_scatter(tensor, dim, op, async_op=async_op)


def reduce_scatter_mean(
    tensor: Tensor, group: Group, *, sum_dtype: torch.dtype, dtype: torch.dtype, out: Tensor | None = None
) -> Pending[Tensor]:
    """Start averaging the ranks' flat tensors; each rank keeps its equal part, in `dtype`.

    The tensor may be written again after `wait()`. On the CPU the parts go as messages of the group: no `isend` or
    `irecv` of it may be under way meanwhile.

    Args:
        tensor: a contiguous 1-d tensor of the same length and dtype on every rank.
        group: the process group.
        sum_dtype: dtype of the sum on other devices; on the CPU it is the tensor's own, or float32 if that is wider.
        dtype: dtype of the result.
        out: memory for the result, with its length and dtype; only used on the CPU.

    Raises:
        ValueError: the group's size does not divide the tensor's length, or the tensor is not of floats.
    """
    _check_op("avg", tensor)
    _check_divides(tensor, checked_dim(0, tensor.shape), group)
    if group.size == 1:
        return Pending(tensor, finish=lambda mean: mean.to(dtype))
    sent_dtype = tensor.dtype if tensor.is_cpu else sum_dtype
    transport = _transport("reduce_scatter_mean", tensor, group, num_bytes=lambda: tensor.numel() * sent_dtype.itemsize)
    return transport.reduce_scatter_mean(tensor, sum_dtype=sum_dtype, dtype=dtype, out=out)


@overload
def all_to_all(
    tensor: Tensor, group: Group, *, split_dim: int, concat_dim: int, async_op: Literal[False] = False
) -> Tensor: ...
@overload
def all_to_all(
    tensor: Tensor, group: Group, *, split_dim: int, concat_dim: int, async_op: Literal[True]
) -> Pending[Tensor]: ...
def all_to_all(
    tensor: Tensor, group: Group, *, split_dim: int, concat_dim: int, async_op: bool = False
) -> Tensor | Pending[Tensor]:
    """Split `tensor` along `split_dim` into one part per rank; concatenate the received parts along `concat_dim`.

    Raises:
        ValueError: the group's size does not divide `tensor.shape[split_dim]`.
    """
    split_dim, concat_dim = checked_dim(split_dim, tensor.shape), checked_dim(concat_dim, tensor.shape)
    _check_divides(tensor, split_dim, group)
    if group.size == 1:
        return ready(tensor, async_op=async_op)
    transport = _transport("all_to_all", tensor, group, split_dim=split_dim, concat_dim=concat_dim)
    return transport.all_to_all(tensor, split_dim, concat_dim, async_op=async_op)


def all_to_all_v(tensor: Tensor, group: Group, *, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
    """Send each rank its `send_counts` rows of `tensor`; concatenate the rows received.

    Args:
        tensor: `[sum(send_counts), ...]`, in group order; dtype and other dims are the same on all ranks.
        group: the ranks. On the CPU the rows go as its messages: no `isend` or `irecv` of it may be under way
            meanwhile.
        send_counts: number of rows for each rank, equal to that rank's number in `receive_counts` for this one.
        receive_counts: number of rows from each rank.

    Returns:
        `[sum(receive_counts), ...]`, in group order.

    Raises:
        ValueError: the counts are not one nonnegative number per rank, the send counts do not add up to the tensor's
            rows, or the two counts of this rank for itself differ.
        NotImplementedError: on XLA, where every rank records the same graph.
    """
    _check_counts(tensor, group, send_counts, receive_counts)
    if group.size == 1:
        return tensor
    transport = _transport(
        "all_to_all_v",
        tensor[:0],  # ranks have other numbers of rows
        group,
        num_bytes=lambda: tensor[send_counts[group.rank] :].nbytes,  # its own rows stay
    )
    return transport.all_to_all_v(tensor, send_counts, receive_counts)


def broadcast(tensor: Tensor, group: Group, *, source: int = 0) -> Tensor:
    """The tensor of the rank with index `source` in the group; the other ranks' tensors have its shape and dtype.

    Raises:
        ValueError: the group has no such index.
    """
    check_index("source", source, group)
    if group.size == 1:
        return tensor
    return _transport("broadcast", tensor, group, source=source).broadcast(tensor, source)


def barrier(group: Group) -> None:
    """Return once every rank of the group has called this."""
    if group.size > 1:
        if debug.enabled():
            debug.wait_for_agreement("barrier", group, None, {})
        host_transport_of(group).barrier()


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """Every rank's (picklable, small) Python value, in group order: for plans and error reports, not for data."""
    if group.size == 1:
        return [value]
    if debug.enabled():
        debug.wait_for_agreement("all_gather_object", group, None, {})
    return host_transport_of(group).all_gather_object(value)


def _check_op(op: str, tensor: Tensor) -> None:
    if op not in get_args(ReduceOp):
        raise ValueError(f"op={op!r} is not a reduction; use one of {', '.join(get_args(ReduceOp))}")
    if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"op='avg' of {tensor.dtype} has no result of that dtype; use op='sum' or convert to float")


def _check_counts(tensor: Tensor, group: Group, send_counts: Sequence[int], receive_counts: Sequence[int]) -> None:
    for name, counts in (("send_counts", send_counts), ("receive_counts", receive_counts)):
        if len(counts) != group.size or min(counts) < 0:
            raise ValueError(f"{name}={list(counts)} must have a number of rows for each of the {group.size} ranks")
    if not tensor.dim() or sum(send_counts) != tensor.shape[0]:
        raise ValueError(
            f"send_counts={list(send_counts)} are {sum(send_counts)} rows, but the tensor's shape is "
            f"{tuple(tensor.shape)}; send all of its dim 0"
        )
    if send_counts[group.rank] != receive_counts[group.rank]:
        raise ValueError(
            f"send_counts={list(send_counts)} and receive_counts={list(receive_counts)} differ at this rank's own "
            f"index {group.rank}"
        )


def _check_divides(tensor: Tensor, dim: int, group: Group) -> None:
    if tensor.shape[dim] % group.size:
        raise ValueError(
            f"{group} of {group.size} ranks does not divide dim {dim} of shape {tuple(tensor.shape)}; "
            f"pad it to {-(-tensor.shape[dim] // group.size) * group.size}"
        )
