"""Language-model head and cross entropy in one, in chunks of tokens: the whole logits never exist.

For long sequences and large vocabularies the logits and their gradient are by far the largest tensors of a model.
Here each chunk's logits become losses and gradients at once, and their memory serves the next chunk (as in Liger
Kernel, Hsu et al. 2024). So gradients are computed in the forward pass, and nothing twice: the same three matrix
products as the head's own, without a fourth for recomputing the logits. Between forward and backward, the gradients
of hidden states and weight are kept instead of hidden states and logits.
"""

from typing import Any, Literal, get_args

import torch
from nxd_state import Group, Pending, all_gather, all_reduce_, at_least_float32, reduce_scatter
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nxd_layers.cross_entropy import LossDefinition, check_loss_arguments, logits_grad, token_losses
from nxd_layers.linear import ColumnParallelLinear
from nxd_layers.tracing import leaf_of_traces, mixes_up_saved_tensors

Reduction = Literal["mean", "sum"]


class _LinearCrossEntropy(Function):
    """Sum of the token losses; the gradients are made on the way.

    Arguments of `forward`: hidden `[..., hidden]`, weight `[vocab/tp, hidden]`, bias `[vocab/tp]` or None, labels
    `[...]`, the loss, the dim along which the hidden states are split if they are, tokens per chunk, the dtype of the
    matrix products, and whether gradients are wanted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        definition: LossDefinition,
        sequence_dim: int | None,
        chunk_size: int,
        dtype: torch.dtype,
        needs_grad: bool,
    ) -> Tensor:
        group = definition.group
        whole = hidden.to(dtype) if sequence_dim is None else all_gather(hidden.to(dtype), group, dim=sequence_dim)
        rows, labels = whole.reshape(-1, whole.shape[-1]), labels.reshape(-1)
        needed = [needs_grad and needs for needs in ctx.needs_input_grad[:3]]
        head = _HeadInChunks(weight.to(dtype), None if bias is None else bias.to(dtype), rows, needed)
        total = at_least_float32(rows).new_zeros(())
        starts = range(0, max(1, rows.shape[0]), chunk_size)
        for start in starts:
            chunk = slice(start, start + chunk_size)
            logits = at_least_float32(head.logits(chunk))
            losses, saved = token_losses(logits, labels[chunk], definition, overwrite=True)
            total += losses.sum()
            if any(needed):
                grad = logits_grad(saved, torch.ones_like(losses), definition, overwrite=True).to(dtype)
                head.add_input_grad(grad, chunk)
                if start == starts[-1]:  # the sum over the ranks runs beside the last weight gradient
                    pending = head.sum_input_grad(whole.shape, group, sequence_dim)
                head.add_parameter_grads(grad, chunk)
        if any(needed):
            ctx.grads = [pending.wait() if pending is not None else None, head.grad_weight, head.grad_bias]
            ctx.dtypes = [hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "linear_cross_entropy's gradients were released by its first backward; call it again instead of "
                "retain_graph=True, or use the head and parallel_cross_entropy"
            )
        # In place: these are the largest tensors here, and nothing else refers to them.
        grads = [
            None if grad is None else grad.mul_(grad_total).to(dtype)
            for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        ]
        ctx.grads = None
        return *grads, None, None, None, None, None, None


class _HeadInChunks:
    """The head's matrix products, for some rows at a time, and their gradients, over all rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: Tensor, needed: list[bool]) -> None:
        self.weight, self.bias, self.rows = weight, bias, rows
        wide = at_least_float32(rows[:0]).dtype  # sums over chunks of short numbers would lose the last ones
        self.grad_rows = torch.empty_like(rows) if needed[0] else None
        self.grad_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self.grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

    # Products write to memory made before: selective activation checkpointing, which keeps the results of products
    # that make their own, would keep every chunk's.

    def logits(self, chunk: slice) -> Tensor:
        rows = self.rows[chunk]
        logits = rows.new_empty(rows.shape[0], self.weight.shape[0])
        if self.bias is None:
            return torch.mm(rows, self.weight.t(), out=logits)
        return torch.addmm(self.bias, rows, self.weight.t(), out=logits)

    def add_input_grad(self, grad: Tensor, chunk: slice) -> None:
        if self.grad_rows is not None:
            torch.mm(grad, self.weight, out=self.grad_rows[chunk])

    def sum_input_grad(self, shape: torch.Size, group: Group, sequence_dim: int | None) -> Pending[Tensor] | None:
        """Start the one sum over the ranks of the input's gradient."""
        if self.grad_rows is None:
            return None
        grad = self.grad_rows.view(shape)
        if sequence_dim is None:
            return all_reduce_(grad, group, async_op=True)
        return reduce_scatter(grad, group, dim=sequence_dim, async_op=True)

    def add_parameter_grads(self, grad: Tensor, chunk: slice) -> None:
        if self.grad_weight is not None:
            if self.grad_weight.dtype == grad.dtype:
                self.grad_weight.addmm_(grad.t(), self.rows[chunk])
            else:
                product = torch.empty_like(self.weight)
                self.grad_weight += torch.mm(grad.t(), self.rows[chunk], out=product)
        if self.grad_bias is not None:
            self.grad_bias += grad.sum(dim=0, dtype=self.grad_bias.dtype)


# Features of a head whose product this module computes as the head does.
_HEAD_FEATURES = ("gather_output", "sequence_parallel_enabled", "padding", "tensor_model_parallel_group")


@leaf_of_traces
def linear_cross_entropy(
    hidden: Tensor,
    head: ColumnParallelLinear,
    labels: Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_size: int = 512,
) -> Tensor:
    """`parallel_cross_entropy(head(hidden), labels)`, reduced, in the memory of `chunk_size` tokens' logits.

    Communicates, besides two small all-reduces per chunk, what the head does: one all-gather of a sequence-parallel
    input and one sum (all-reduce or reduce-scatter) of its gradient. Gradients go back once: a second backward through
    the same loss raises. Shorter dtypes sum the weight's gradient over the chunks in float32.

    Args:
        hidden: `[..., hidden]`; with a sequence-parallel head this rank's part of the sequence, `[seq/tp, ...]`.
        head: with or without bias, padding, or a weight tied to an embedding. `gather_output` plays no part.
        labels: `[...]` integer, whole.
        label_smoothing: as for `parallel_cross_entropy`.
        ignore_index: label of tokens without loss and gradient.
        reduction: "mean" over the tokens that are not ignored (0 if there are none), or "sum".
        chunk_size: tokens whose logits exist at once. Fewer need less memory; below some hundreds the matrix products
            become inefficient.

    Returns:
        0-d, float32 or float64, the same on every rank.

    Raises:
        ValueError: as for `parallel_cross_entropy`; a head of fused matrices, with a LoRA adapter that is not merged,
            or with options that are not followed here, no such reduction, or a chunk_size below one.
        NotImplementedError: torch 2.11 compiles it, which would give wrong gradients.
    """
    if mixes_up_saved_tensors():
        raise NotImplementedError(
            "torch 2.11 compiles linear_cross_entropy to wrong gradients; use another version of torch, or the head "
            "and parallel_cross_entropy"
        )
    head.check_features(
        _HEAD_FEATURES,
        by="linear_cross_entropy",
        remedy="use the head and parallel_cross_entropy, or build the head without",
    )
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction={reduction!r} is unknown; use one of {', '.join(get_args(Reduction))}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be positive")
    group = head.group()
    definition = LossDefinition(label_smoothing, ignore_index, head.output_size, group)
    sequence_dim = head.sequence_dimension if head.sequence_parallel_enabled else None
    check_loss_arguments((*_whole_tokens(hidden, sequence_dim, group), head.padded_output_size), labels, definition)
    device_type = hidden.device.type
    autocast = torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64
    total: Tensor = _LinearCrossEntropy.apply(
        hidden,
        head.weight,
        head.bias,
        labels.long(),
        definition,
        sequence_dim,
        chunk_size,
        torch.get_autocast_dtype(device_type) if autocast else hidden.dtype,
        torch.is_grad_enabled(),
    )
    return total if reduction == "sum" else total / (labels != ignore_index).sum().clamp(min=1)


def takes_head(head: nn.Module) -> bool:
    """Return whether `linear_cross_entropy` computes what this head and `parallel_cross_entropy` would."""
    return isinstance(head, ColumnParallelLinear) and head.features().keys() <= set(_HEAD_FEATURES)


def _whole_tokens(hidden: Tensor, sequence_dim: int | None, group: Group) -> tuple[int, ...]:
    """Shape of the tokens, `[...]`, over the whole sequence."""
    shape = list(hidden.shape)
    if sequence_dim is not None:
        shape[sequence_dim] *= group.size
    return tuple(shape[:-1])
