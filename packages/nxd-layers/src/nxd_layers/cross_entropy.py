"""Cross entropy over logits that are split along the vocabulary.

Each rank reduces its own part of the logits to three numbers per token, and only those are exchanged: the whole
logits exist nowhere (Shoeybi et al. 2019, section 3). Two small all-reduces forward, none backward.
"""

from typing import Any

import torch
from nxd_state import Group, active_group, all_reduce_
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class _ParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, label_smoothing: float, ignore_index: int, group: Group
    ) -> Tensor:
        local_vocab = logits.shape[-1]
        vocab = local_vocab * group.size
        ignored = labels == ignore_index
        local_label = labels - group.rank * local_vocab
        is_mine = (local_label >= 0) & (local_label < local_vocab) & ~ignored
        index = local_label.masked_fill(~is_mine, 0).unsqueeze(-1)

        largest = all_reduce_(_widened(logits.amax(dim=-1)), group, op="max")
        shifted = logits - largest.unsqueeze(-1)
        label_logit = shifted.gather(-1, index).squeeze(-1).masked_fill(~is_mine, 0.0)
        sums = [label_logit] if label_smoothing == 0.0 else [label_logit, shifted.sum(dim=-1)]
        exponentials = shifted.exp_()
        totals = all_reduce_(torch.stack([exponentials.sum(dim=-1), *sums]), group)
        log_normalizer = totals[0].log()
        loss = log_normalizer - (1.0 - label_smoothing) * totals[1]
        if label_smoothing != 0.0:
            loss -= label_smoothing / vocab * totals[2]
        ctx.save_for_backward(exponentials, totals[0], index, is_mine, ignored)
        ctx.label_smoothing, ctx.vocab, ctx.dtype = label_smoothing, vocab, logits.dtype
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        exponentials, normalizer, index, is_mine, ignored = ctx.saved_tensors
        scale = grad_loss.masked_fill(ignored, 0.0).unsqueeze(-1)
        grad = exponentials * (scale / normalizer.unsqueeze(-1))
        if ctx.label_smoothing != 0.0:
            grad -= scale * (ctx.label_smoothing / ctx.vocab)
        on_label = (scale * (ctx.label_smoothing - 1.0)).masked_fill(~is_mine.unsqueeze(-1), 0.0)
        grad.scatter_add_(-1, index, on_label)
        return grad.to(ctx.dtype), None, None, None, None


def _widened(tensor: Tensor) -> Tensor:
    """In float32 if the dtype is shorter."""
    return tensor.float() if tensor.itemsize < 4 else tensor


def parallel_cross_entropy(
    parallel_logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, *, ignore_index: int = -100
) -> Tensor:
    """Loss per token from logits split along the vocabulary; the same on every rank, and the same as torch's.

    Args:
        parallel_logits: `[..., vocab/tp]`, any float dtype; half precision is computed in float32. Not changed.
        labels: `[...]` integer, whole: ids in the whole vocabulary.
        label_smoothing: share of the target spread evenly over the vocabulary, in [0, 1], as in
            `torch.nn.functional.cross_entropy`.
        ignore_index: label of tokens without loss and gradient.

    Returns:
        `[...]`, float32 or float64; 0 at ignored tokens. Take the mean over the others yourself.

    Raises:
        ValueError: shapes that do not match, labels that are no integers, a smoothing outside [0, 1], or (on the
            CPU) a label outside the vocabulary.
    """
    group = active_group("tp")
    _check_arguments(parallel_logits, labels, label_smoothing, ignore_index, group)
    labels = labels.long()
    if group.size > 1:
        return _ParallelCrossEntropy.apply(parallel_logits, labels, label_smoothing, ignore_index, group)
    wide = _widened(parallel_logits)
    return F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]),
        labels.reshape(-1),
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        reduction="none",
    ).view(labels.shape)


def _check_arguments(logits: Tensor, labels: Tensor, label_smoothing: float, ignore_index: int, group: Group) -> None:
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}; expected "
            f"{tuple(logits.shape[:-1])}"
        )
    if labels.is_floating_point():
        raise ValueError(f"labels of dtype {labels.dtype} are not ids of the vocabulary; expected integers")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} is outside [0, 1]")
    # Elsewhere a look at the values would stall the device.
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        vocab = logits.shape[-1] * group.size
        wrong = ((labels < 0) | (labels >= vocab)) & (labels != ignore_index)
        if wrong.any():
            raise ValueError(
                f"label {int(labels[wrong][0])} is outside the vocabulary 0..{vocab - 1} and is not "
                f"ignore_index={ignore_index}"
            )
