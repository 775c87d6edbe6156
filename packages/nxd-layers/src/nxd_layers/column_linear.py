"""The matrix product behind column-parallel layers: one shared input, one or several split weights.

Layers that read the same input (query, key and value; gate and up) go through one call, so that the group
communicates once in each direction: an all-gather of a sequence-parallel input forward, and one sum of the input's
gradient backward, which runs while the weight gradients are computed.
"""

from typing import Any

import torch
from nxd_state import Group, Pending, all_gather, all_reduce_, reduce_scatter
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class _ColumnLinear(Function):
    """`outputs[i] = input @ weights[i].T + biases[i]` for weights split on dim 0.

    Arguments of `forward`: input `[..., in]` (`[seq/tp, ..., in]` if sequence_dim is given), group, sequence_dim,
    then all weights `[out_i/tp, in]`, then all biases `[out_i/tp]` or None.
    """

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, group: Group, sequence_dim: int | None, *weights_and_biases: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        whole = input_ if sequence_dim is None else all_gather(input_, group, dim=sequence_dim)
        # The gathered input is kept (gathering it again backward would cost a third collective), but not for
        # frozen weights: only their own gradients need it.
        weights_learn = any(ctx.needs_input_grad[3 : 3 + count])
        ctx.save_for_backward(whole if weights_learn else None, *weights)
        ctx.group, ctx.sequence_dim, ctx.whole_shape = group, sequence_dim, whole.shape
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True) if w is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        needs_input, _, _, *needs_rest = ctx.needs_input_grad
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        pending = _sum_input_grad(ctx, rows, weights) if needs_input else None
        whole_rows = None if whole is None else whole.reshape(-1, whole.shape[-1])
        weight_grads = [
            grad.t().mm(whole_rows) if needed and whole_rows is not None else None
            for grad, needed in zip(rows, needs_rest[: len(rows)], strict=True)
        ]
        bias_grads = [
            grad.sum(dim=0) if needed else None for grad, needed in zip(rows, needs_rest[len(rows) :], strict=True)
        ]
        return (pending.wait() if pending else None, None, None, *weight_grads, *bias_grads)


def _sum_input_grad(ctx: Any, rows: list[Tensor], weights: list[Tensor]) -> Pending:
    """Start the sum over the ranks of the input's gradient."""
    grad_rows = rows[0].mm(weights[0])
    for grad, weight in zip(rows[1:], weights[1:], strict=True):
        grad_rows.addmm_(grad, weight)
    grad_input = grad_rows.view(ctx.whole_shape)
    if ctx.sequence_dim is None:
        return all_reduce_(grad_input, ctx.group, async_op=True)
    return reduce_scatter(grad_input, ctx.group, dim=ctx.sequence_dim, async_op=True)


def column_linear(
    input_: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    group: Group,
    *,
    sequence_dim: int | None = None,
) -> tuple[Tensor, ...]:
    """Apply several column-parallel weights to one input.

    Args:
        input_: `[..., in]`, whole on every rank; with `sequence_dim` this rank's part of the sequence.
        weights: `[out_i/tp, in]` each.
        biases: `[out_i/tp]` or None each.
        group: the tensor-parallel group.
        sequence_dim: the dim along which the input is split over the group, if it is.

    Returns:
        `[..., out_i/tp]` each, over the whole sequence.
    """
    if group.size == 1:
        return tuple(F.linear(input_, w, b) for w, b in zip(weights, biases, strict=True))
    if torch.is_autocast_enabled(input_.device.type):
        # Cast here, so that the collectives move the short dtype and autograd casts the gradients back.
        dtype = torch.get_autocast_dtype(input_.device.type)
        input_ = _autocast(input_, dtype)
        weights = [_autocast(weight, dtype) for weight in weights]
        biases = [None if bias is None else _autocast(bias, dtype) for bias in biases]
    outputs: tuple[Tensor, ...] = _ColumnLinear.apply(input_, group, sequence_dim, *weights, *biases)
    return outputs


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)  # torch leaves float64 alone as well
