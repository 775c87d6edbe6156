"""Borders between the regions of a tensor-parallel model, as autograd functions.

A tensor is either whole on every rank of the tensor-parallel group, split along one of its dims, or a partial sum.
Each function here takes it from one of these forms to another, and its gradient the other way: the conjugate
operators of Shoeybi et al. 2019 ("Megatron-LM") and, for the sequence-parallel ones, of Korthikanti et al. 2022
("Reducing Activation Recomputation in Large Transformer Models"). Without an initialized mesh, or with one rank,
each is the identity. Each takes another process group as well, and is one call in a trace of torch.fx.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from nxd_state import (
    Group,
    active_group,
    all_gather,
    all_reduce,
    all_reduce_,
    all_to_all,
    checked_dim,
    group_of,
    reduce_scatter,
)
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from nxd_layers.tracing import leaf_of_traces

GivenGroup = Group | ProcessGroup | None

_reduce_in_place = ContextVar("_reduce_in_place", default=True)

# The autograd functions below return one gradient per argument of `forward`; only the tensor has one.


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        return all_reduce(partial, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceInPlace(_Reduce):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(partial)
        return all_reduce_(partial, group)


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return local_part(whole, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.group, dim=ctx.dim), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group, dim: int, grad_is_partial: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.grad_is_partial = group, dim, grad_is_partial
        return all_gather(part, group, dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.grad_is_partial:
            return reduce_scatter(grad, ctx.group, dim=ctx.dim), None, None, None
        return local_part(grad, ctx.group, ctx.dim), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group, dim: int, grad_dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.dim, ctx.dtype, ctx.grad_dtype = group, dim, partial.dtype, grad_dtype
        return reduce_scatter(partial, group, dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent = grad if ctx.grad_dtype is None else grad.to(ctx.grad_dtype)
        return all_gather(sent, ctx.group, dim=ctx.dim).to(ctx.dtype), None, None, None


def process_group_as(given: GivenGroup) -> Group:
    """The group to communicate over: the tensor-parallel one if None is given."""
    if given is None:
        return active_group("tp")
    return given if isinstance(given, Group) else group_of(given)


@leaf_of_traces
def copy_to_tensor_model_parallel_region(input_: Tensor, process_group: GivenGroup = None) -> Tensor:
    """Whole to whole, used by split weights: identity forward, gradients summed over the ranks."""
    group = process_group_as(process_group)
    return input_ if group.size == 1 else _Copy.apply(input_, group)


@leaf_of_traces
def reduce_from_tensor_model_parallel_region(input_: Tensor, process_group: GivenGroup = None) -> Tensor:
    """Partial sums to whole: summed over the ranks forward, identity backward. The input is not changed."""
    group = process_group_as(process_group)
    return input_ if group.size == 1 else _Reduce.apply(input_, group)


@leaf_of_traces
def reduce_from_tensor_model_parallel_region_(input_: Tensor, process_group: GivenGroup = None) -> Tensor:
    """`reduce_from_tensor_model_parallel_region` in place, for an input that no backward needs (a matmul's output)."""
    # torch.compile cannot trace an in-place autograd function, and drops the copy itself.
    if torch.compiler.is_compiling() or not _reduce_in_place.get():
        return reduce_from_tensor_model_parallel_region(input_, process_group)
    group = process_group_as(process_group)
    return input_ if group.size == 1 else _ReduceInPlace.apply(input_, group)


@contextmanager
def reductions_out_of_place() -> Iterator[None]:
    """Inside, `reduce_from_tensor_model_parallel_region_` leaves its input unchanged: it is kept after all."""
    token = _reduce_in_place.set(False)
    try:
        yield
    finally:
        _reduce_in_place.reset(token)


@leaf_of_traces
def scatter_to_tensor_model_parallel_region(input_: Tensor, dim: int = -1, process_group: GivenGroup = None) -> Tensor:
    """Whole to split along `dim` (the last one unless said otherwise); gradients are gathered."""
    group = process_group_as(process_group)
    return input_ if group.size == 1 else _Split.apply(input_, group, checked_dim(dim, input_.shape))


@leaf_of_traces
def gather_from_tensor_model_parallel_region(input_: Tensor, dim: int = -1, process_group: GivenGroup = None) -> Tensor:
    """Split along `dim` to whole; each rank keeps its part of the gradient, which must be whole and equal."""
    group = process_group_as(process_group)
    return input_ if group.size == 1 else _Gather.apply(input_, group, checked_dim(dim, input_.shape), False)


@leaf_of_traces
def scatter_to_sequence_parallel_region(
    input_: Tensor, sequence_dimension: int = 0, process_group: GivenGroup = None
) -> Tensor:
    """Whole `[seq, batch, hidden]` to `[seq/tp, batch, hidden]`; gradients are gathered."""
    group = process_group_as(process_group)
    return input_ if group.size == 1 else _Split.apply(input_, group, checked_dim(sequence_dimension, input_.shape))


@leaf_of_traces
def gather_from_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: GivenGroup = None,
) -> Tensor:
    """`[seq/tp, batch, hidden]` to whole `[seq, batch, hidden]`.

    Args:
        input_: this rank's part of the sequence.
        sequence_dimension: the dim that is split.
        to_model_parallel: whether split weights follow, so that each rank has a partial gradient and they
            are reduce-scattered. False where what follows is the same on all ranks, as at the end of a model: each
            rank keeps its part of the gradient.
        process_group: the ranks that share the sequence; the tensor-parallel ones if None.
    """
    group = process_group_as(process_group)
    if group.size == 1:
        return input_
    return _Gather.apply(input_, group, checked_dim(sequence_dimension, input_.shape), to_model_parallel)


@leaf_of_traces
def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    process_group: GivenGroup = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Partial sums `[seq, batch, hidden]` to their sum, split as `[seq/tp, batch, hidden]`; gradients are gathered.

    Args:
        input_: this rank's summands.
        sequence_dimension: the dim that is split.
        process_group: the ranks to sum over; the tensor-parallel ones if None.
        dtype: dtype in which gradients are sent; their own if None. They are returned in the input's dtype.
    """
    group = process_group_as(process_group)
    if group.size == 1:
        return input_
    return _ReduceScatter.apply(input_, group, checked_dim(sequence_dimension, input_.shape), dtype)


def local_part(whole: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part along `dim` of a tensor that every rank holds, as a copy."""
    dim = checked_dim(dim, whole.shape)
    length, rest = divmod(whole.shape[dim], group.size)
    if rest:
        raise ValueError(
            f"tensor_model_parallel_size={group.size} does not divide dim {dim} of shape {tuple(whole.shape)}; "
            f"pad it to {(length + 1) * group.size}"
        )
    parts = whole.unflatten(dim, (group.size, length))
    own = parts.index_select(dim, group.rank_tensor(whole).view(1))
    return no_view(own, [*whole.shape[:dim], length, *whole.shape[dim + 1 :]])


def no_view(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """`tensor.view(shape)` of a tensor that nothing else refers to, and that autograd does not take for a view.

    Views that an autograd function returns cannot be changed in place, as models do with outputs of layers.
    """
    shaped: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return shaped


def parts_in_order(whole: Tensor, order: Sequence[int]) -> Tensor:
    """Equal parts of the last dim, in another order."""
    parts = whole.unflatten(-1, (len(order), -1))
    return parts.index_select(-2, torch.tensor(order, device=whole.device)).flatten(-2)


def all_to_all_region(tensor: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    """`all_to_all` with gradients, which travel in reverse.

    Args:
        tensor: split along `split_dim`, a part for each rank.
        group: the ranks.
        split_dim: dim along which the parts are split.
        concat_dim: along which those of all ranks are joined.
    """
    exchanged: Tensor = _AllToAll.apply(tensor, group, split_dim, concat_dim)
    return exchanged


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
        ctx.group, ctx.dims = group, (split_dim, concat_dim)
        return all_to_all(tensor, group, split_dim=split_dim, concat_dim=concat_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, concat_dim = ctx.dims
        return all_to_all(grad, ctx.group, split_dim=concat_dim, concat_dim=split_dim), None, None, None


@leaf_of_traces
def sum_over_contexts(part: Tensor) -> Tensor:
    """Sum the context-parallel ranks' parts of a loss; the sum is the same on all of them.

    Gradients must be averaged over replicas and context-parallel ranks alike, as `nxd_optim` does, so each rank's are
    multiplied by the number of context-parallel ranks.

    Args:
        part: this rank's part, such as the sum of its losses divided by the number of all labels, 0-d.
    """
    if active_group("cp").size == 1:
        return part
    total: Tensor = _SumOverContexts.apply(part)
    return total


class _SumOverContexts(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return all_reduce(part, active_group("cp"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * active_group("cp").size
