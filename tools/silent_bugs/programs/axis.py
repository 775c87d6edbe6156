"""One axis of a mesh, and its collectives with gradients, as Megatron-style programs write them by hand.

Every function returns its input on an axis of one rank, so one process runs the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """The ranks that share an axis.

    Attributes:
        group: their process group; None on an axis of one rank.
        rank: this rank's place on the axis.
        size: the number of ranks on the axis.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the axis, without a gradient."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Return the largest values on the axis, without a gradient."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the ranks' tensors joined along `dim`, without a gradient."""
        return torch.cat(self.gather_list(x), dim)

    def gather_list(self, x: Tensor) -> list[Tensor]:
        """Return the ranks' tensors in order, without a gradient."""
        x = x.detach().contiguous()
        if self.size == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return parts

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of `dim`."""
        return x.chunk(self.size, dim)[self.rank]


ONE = Axis()


def world() -> Axis:
    """Return the axis of all ranks, or of one where no process group is initialized."""
    if not dist.is_initialized():
        return ONE
    return Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def axis_of(groups: Sequence[Sequence[int]]) -> Axis:
    """Create the process groups of an axis and return this rank's.

    Args:
        groups: the ranks of each group, in order; they cover the world.
    """
    mine = ONE
    for ranks in groups:
        group = dist.new_group(list(ranks))
        if isinstance(group, dist.ProcessGroup) and dist.get_rank() in ranks:
            mine = Axis(group, list(ranks).index(dist.get_rank()), len(ranks))
    return mine


class _Linear(torch.autograd.Function):
    """A linear function and its transpose, each given as a function of a tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.transpose = transpose
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(gradients[0]), None, None


def linear(x: Tensor, forward: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `forward(x)`; its gradient goes through `transpose`, right or wrong."""
    return _Linear.apply(x, forward, transpose)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def sum_forward(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis; the gradient, equal on all ranks, is passed on as it is."""
    return x if axis.size == 1 else linear(x, axis.sum, _same)


def sum_backward(x: Tensor, axis: Axis) -> Tensor:
    """Pass the input on as it is; the gradients of the ranks are summed."""
    return x if axis.size == 1 else linear(x, _same, axis.sum)


def gather(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Join the ranks' parts of `dim`; the gradients of the ranks are summed, and each rank takes its part."""
    return x if axis.size == 1 else linear(x, lambda y: axis.gather(y, dim), lambda g: axis.part(axis.sum(g), dim))


def gather_replicated(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Join the ranks' parts of `dim` for a computation equal on all ranks: each takes its part of the gradient."""
    return x if axis.size == 1 else linear(x, lambda y: axis.gather(y, dim), lambda g: axis.part(g, dim).contiguous())


def reduce_scatter(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Sum over the axis and take this rank's part of `dim`; the gradients are joined."""
    return (
        x
        if axis.size == 1
        else linear(x, lambda y: axis.part(axis.sum(y), dim).contiguous(), lambda g: axis.gather(g, dim))
    )


def split(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Take this rank's part of `dim` of a tensor that is equal on all ranks; the gradients are joined."""
    return x if axis.size == 1 else linear(x, lambda y: axis.part(y, dim).contiguous(), lambda g: axis.gather(g, dim))


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    """Send `sent[i]` rows to rank i and return the `received[i]` rows of each rank; gradients go back."""

    def exchange(y: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        result = y.new_empty(sum(taken), *y.shape[1:])
        dist.all_to_all_single(result, y.contiguous(), list(taken), list(given), group=axis.group)
        return result

    if axis.size == 1:
        return x
    return linear(x, lambda y: exchange(y, sent, received), lambda g: exchange(g, received, sent))
