"""Sums of loss over the context-parallel ranks."""

from typing import Any

from nxd_state import active_group, all_reduce
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nxd_layers.tracing import leaf_of_traces


@leaf_of_traces
def sum_over_contexts(part: Tensor) -> Tensor:
    """The sum of what the context-parallel ranks have of a loss, the same on all of them.

    Gradients are to be averaged over replicas and context-parallel ranks alike, as `nxd_optim` does. So those of each
    rank are of its part times the number of these ranks.

    Args:
        part: this rank's, such as the sum of its losses divided by the number of all labels, 0-d.
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
