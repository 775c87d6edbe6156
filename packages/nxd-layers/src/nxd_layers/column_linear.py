"""The matrix product behind column-parallel layers: one shared input, one or several split weights.

Layers that read the same input (query, key and value; gate and up) go through one call, so that the group
communicates once in each direction: an all-gather of a sequence-parallel input forward, and one sum of the input's
gradient backward, which runs while the weight gradients are computed. Where several ranks hold the same key and value
heads, one more sum adds up their gradients while the gradients of the other rows are computed.
"""

from typing import Any

import torch
from nxd_state import Group, Pending, all_gather, all_reduce_, reduce_scatter
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nxd_layers.key_value_heads import HeadCopies
from nxd_layers.mappings import no_view


class _ColumnLinear(Function):
    """`outputs[i] = input @ weights[i].T + biases[i]` for weights split on dim 0.

    Arguments of `forward`: input `[..., in]` (`[seq/tp, ..., in]` if sequence_dim is given), group (None: the input's
    gradient stays partial), sequence_dim, copies, reduce_dtype, then all weights `[out_i/tp, in]`, then all biases
    `[out_i/tp]` or None.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        # Taken together: torch.compile tells whether `forward` takes a ctx by counting its parameters and arguments.
        input_, group, sequence_dim, copies, reduce_dtype, *weights_and_biases = arguments
        count = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        whole = input_ if sequence_dim is None else all_gather(input_, group, dim=sequence_dim)
        # The gathered input is kept (gathering it again backward would cost a third collective), but not for
        # frozen weights: only their own gradients need it.
        weights_learn = any(ctx.needs_input_grad[5 : 5 + count])
        ctx.save_for_backward(whole if weights_learn else None, *weights)
        ctx.group, ctx.sequence_dim, ctx.whole_shape = group, sequence_dim, whole.shape
        ctx.copies, ctx.reduce_dtype = copies, reduce_dtype
        return tuple(_output(whole, w, b) for w, b in zip(weights, biases, strict=True) if w is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        partial = _partial_input_grad(ctx, rows, weights) if ctx.needs_input_grad[0] else None
        pending = None if partial is None or ctx.group is None else _start_sum(ctx, partial)
        whole_dtype = None if partial is None else partial.dtype
        whole_rows = None if whole is None else whole.reshape(-1, whole.shape[-1])
        parameter_grads = _grads_of_copied_rows_first if ctx.copies is not None else _parameter_grads
        weight_grads, bias_grads = parameter_grads(ctx, rows, whole_rows)
        grad_input = partial if pending is None else pending.wait().to(whole_dtype)
        return (grad_input, None, None, None, None, *weight_grads, *bias_grads)


def _output(whole: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, whose output would be a view if there is a bias."""
    if bias is None or whole.dim() == 2:
        return F.linear(whole, weight, bias)
    rows = torch.addmm(bias, whole.reshape(-1, whole.shape[-1]), weight.t())
    return no_view(rows, [*whole.shape[:-1], weight.shape[0]])


_Grads = list[Tensor | None]


def _parameter_grads(ctx: Any, rows: list[Tensor], whole_rows: Tensor | None) -> tuple[_Grads, _Grads]:
    """Return the gradients of the weights and of the biases; None for frozen ones."""
    needs = ctx.needs_input_grad[5:]
    weight_grads = [
        grad.t().mm(whole_rows) if needed and whole_rows is not None else None
        for grad, needed in zip(rows, needs[: len(rows)], strict=True)
    ]
    bias_grads = [grad.sum(dim=0) if needed else None for grad, needed in zip(rows, needs[len(rows) :], strict=True)]
    return weight_grads, bias_grads


def _grads_of_copied_rows_first(ctx: Any, rows: list[Tensor], whole_rows: Tensor | None) -> tuple[_Grads, _Grads]:
    """Like `_parameter_grads`, but sum the copies' gradients while those of the other rows are computed."""
    needs = ctx.needs_input_grad[5:]
    bias_grads = [grad.sum(dim=0) if needed else None for grad, needed in zip(rows, needs[len(rows) :], strict=True)]
    weight_grads = [
        grad.new_empty(grad.shape[1], whole_rows.shape[1]) if needed and whole_rows is not None else None
        for grad, needed in zip(rows, needs[: len(rows)], strict=True)
    ]
    copied = [slice(grad.shape[1] - length, None) for grad, length in zip(rows, ctx.copies.rows, strict=True)]
    others = [slice(part.start) for part in copied]

    def multiply(parts: list[slice]) -> None:
        for grad, weight_grad, part in zip(rows, weight_grads, parts, strict=True):
            if weight_grad is not None and whole_rows is not None:
                torch.mm(grad[:, part].t(), whole_rows, out=weight_grad[part])

    multiply(copied)
    grads = zip(weight_grads + bias_grads, copied * 2, strict=True)
    partial = [grad[part] for grad, part in grads if grad is not None and part.start < len(grad)]
    finish = ctx.copies.start_sum(partial, ctx.reduce_dtype) if partial else None
    multiply(others)
    if finish is not None:
        finish()
    return weight_grads, bias_grads


def _partial_input_grad(ctx: Any, rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    """This rank's summand of the gradient of the whole input."""
    grad_rows = rows[0].mm(weights[0])
    for grad, weight in zip(rows[1:], weights[1:], strict=True):
        grad_rows.addmm_(grad, weight)
    return grad_rows.view(ctx.whole_shape)


def _start_sum(ctx: Any, grad_input: Tensor) -> Pending[Tensor]:
    """Start the sum over the ranks of the input's gradient."""
    if ctx.reduce_dtype is not None:
        grad_input = grad_input.to(ctx.reduce_dtype)
    if ctx.sequence_dim is None:
        return all_reduce_(grad_input, ctx.group, async_op=True)
    return reduce_scatter(grad_input, ctx.group, dim=ctx.sequence_dim, async_op=True)


def column_linear(
    input_: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    group: Group | None,
    *,
    sequence_dim: int | None = None,
    copies: HeadCopies | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Apply several column-parallel weights to one input.

    Args:
        input_: `[..., in]`, whole on every rank; with `sequence_dim` this rank's part of the sequence.
        weights: `[out_i/tp, in]` each.
        biases: `[out_i/tp]` or None each.
        group: the tensor-parallel group; None where the input comes from a `SharedInput`, which sums its gradient.
        sequence_dim: the dim along which the input is split over the group, if it is.
        copies: the copied heads in some weights' last rows, if any, whose gradients are summed.
        reduce_dtype: dtype in which gradients are summed over the ranks; their own if None.

    Returns:
        `[..., out_i/tp]` each, over the whole sequence.
    """
    if group is not None and group.size == 1:
        return tuple(F.linear(input_, w, b) for w, b in zip(weights, biases, strict=True))
    # Cast here, so that the collectives move the short dtype and autograd casts the gradients back.
    input_ = in_autocast_dtype(input_)
    weights = [in_autocast_dtype(weight) for weight in weights]
    biases = [None if bias is None else in_autocast_dtype(bias) for bias in biases]
    outputs: tuple[Tensor, ...] = _ColumnLinear.apply(
        input_, group, sequence_dim, copies, reduce_dtype, *weights, *biases
    )
    return outputs


def in_autocast_dtype(tensor: Tensor) -> Tensor:
    """Convert a tensor to the dtype of products, if autocast is enabled."""
    kind = tensor.device.type
    if tensor.is_meta or not torch.is_autocast_enabled(kind):  # torch knows no autocast of tensors without memory
        return tensor
    if tensor.dtype == torch.float64:  # which torch leaves alone as well
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
