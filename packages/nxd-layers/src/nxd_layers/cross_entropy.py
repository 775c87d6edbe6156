"""Cross entropy, log-probabilities and entropy from logits that are split along the vocabulary.

Each rank reduces its own part of the logits to three numbers per token, and only those are exchanged: the whole
logits exist nowhere (Shoeybi et al. 2019, section 3). Two small all-reduces forward, none backward. `chunked_loss`
builds on the same two functions, and never has all tokens' logits at once either. Losses over preferences and rewards
use the log-probabilities and entropies (Rafailov et al. 2023; Schulman et al. 2017).
"""

from dataclasses import dataclass
from typing import Any

import torch
from nxd_state import Group, active_group, all_reduce_, at_least_float32
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nxd_layers.tracing import leaf_of_traces


@dataclass(frozen=True)
class LossDefinition:
    """The definition of a token's loss, given its logits and label.

    Attributes:
        label_smoothing: share of the target that is spread over the vocabulary.
        ignore_index: label of tokens without loss.
        vocab_size: number of tokens; logits beyond are padding.
        group: the ranks that the vocabulary is split over.
    """

    label_smoothing: float
    ignore_index: int
    vocab_size: int
    group: Group

    def padding_of(self, logits: Tensor) -> Tensor | None:
        """The mask of this rank's last logits that belong to no token: bool `[last]`, of one length on every rank.

        None if the vocabulary is not padded.
        """
        local_vocab = logits.shape[-1]
        last = min(local_vocab * self.group.size - self.vocab_size, local_vocab)
        if last == 0:
            return None
        ids = torch.arange(local_vocab - last, local_vocab, device=logits.device)
        return ids + self.group.rank_tensor(logits) * local_vocab >= self.vocab_size


def token_losses(
    logits: Tensor, labels: Tensor, definition: LossDefinition, *, overwrite: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Losses `[...]`, and what `logits_grad` needs: two all-reduces, without gradient of their own.

    Args:
        logits: `[..., vocab/tp]`.
        labels: `[...]` int64.
        definition: definition of the loss.
        overwrite: whether the logits (float32 or float64) may be used as memory.
    """
    group, smoothing = definition.group, definition.label_smoothing
    local_vocab = logits.shape[-1]
    padding = definition.padding_of(logits)
    ignored = labels == definition.ignore_index
    local_label = labels - group.rank_tensor(labels) * local_vocab
    is_mine = (local_label >= 0) & (local_label < local_vocab) & (labels < definition.vocab_size) & ~ignored
    index = local_label.masked_fill(~is_mine, 0).unsqueeze(-1)

    largest = all_reduce_(at_least_float32(largest_logits(logits, padding)), group, op="max")
    shifted = torch.sub(logits, largest.unsqueeze(-1), out=logits if overwrite else None)
    label_logit = shifted.gather(-1, index).squeeze(-1).masked_fill(~is_mine, 0.0)
    sums = [label_logit] if smoothing == 0.0 else [label_logit, fill_padding(shifted, padding, 0.0).sum(dim=-1)]
    exponentials = fill_padding(shifted, padding, -torch.inf).exp_()
    totals = all_reduce_(torch.stack([exponentials.sum(dim=-1), *sums]), group)
    losses = totals[0].log() - (1.0 - smoothing) * totals[1]
    if smoothing != 0.0:
        losses -= smoothing / definition.vocab_size * totals[2]
    return losses.masked_fill(ignored, 0.0), (exponentials, totals[0], index, is_mine, ignored)


def logits_grad(
    saved: tuple[Tensor, ...], grad_losses: Tensor, definition: LossDefinition, *, overwrite: bool
) -> Tensor:
    """Gradient of this rank's logits, `[..., vocab/tp]`; zero at padding.

    Args:
        saved: the second result of `token_losses`.
        grad_losses: `[...]`.
        definition: the one given to `token_losses`.
        overwrite: whether `saved` may be used as memory.
    """
    exponentials, normalizer, index, is_mine, ignored = saved
    scale = grad_losses.masked_fill(ignored, 0.0).unsqueeze(-1)
    grad = torch.mul(exponentials, scale / normalizer.unsqueeze(-1), out=exponentials if overwrite else None)
    smoothing = definition.label_smoothing
    if smoothing != 0.0:
        grad -= scale * (smoothing / definition.vocab_size)
        fill_padding(grad, definition.padding_of(grad), 0.0)
    on_label = (scale * (smoothing - 1.0)).masked_fill(~is_mine.unsqueeze(-1), 0.0)
    return grad.scatter_add_(-1, index, on_label)


def largest_logits(logits: Tensor, padding: Tensor | None) -> Tensor:
    """The largest of this rank's logits `[..., vocab/tp]`, without padding: `[...]`."""
    if padding is None:
        return logits.amax(dim=-1)
    first, last = logits.tensor_split([logits.shape[-1] - padding.shape[0]], dim=-1)
    largest = last.masked_fill(padding, -torch.inf).amax(dim=-1)
    return torch.maximum(largest, first.amax(dim=-1)) if first.shape[-1] else largest


def fill_padding(logits: Tensor, padding: Tensor | None, value: float) -> Tensor:
    """Overwrite the padding among the last logits."""
    if padding is not None:
        logits[..., -padding.shape[0] :].masked_fill_(padding, value)
    return logits


class _ParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, definition: LossDefinition) -> Tensor:
        losses, saved = token_losses(logits, labels, definition, overwrite=False)
        ctx.save_for_backward(*saved)
        ctx.definition, ctx.dtype = definition, logits.dtype
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None]:
        return logits_grad(ctx.saved_tensors, grad_losses, ctx.definition, overwrite=False).to(ctx.dtype), None, None


@leaf_of_traces
def parallel_cross_entropy(
    parallel_logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> Tensor:
    """Loss per token from logits split along the vocabulary; the same on every rank, and the same as torch's.

    Args:
        parallel_logits: `[..., vocab/tp]`, any float dtype; half precision is computed in float32. Not changed.
        labels: `[...]` integer, whole: ids in the whole vocabulary.
        label_smoothing: share of the target spread evenly over the vocabulary, in [0, 1], as in
            `torch.nn.functional.cross_entropy`.
        ignore_index: label of tokens without loss and gradient.
        vocab_size: number of tokens, if the logits' dim is padded: logits beyond, whatever they are, have no part in
            the loss and get no gradient.

    Returns:
        `[...]`, float32 or float64; 0 at ignored tokens. Take the mean over the others yourself.

    Raises:
        ValueError: shapes that do not match, labels that are no integers, a smoothing outside [0, 1], a vocab_size of
            more than there are logits, or (on the CPU) a label outside the vocabulary.
    """
    group = active_group("tp")
    vocab = parallel_logits.shape[-1] * group.size if vocab_size is None else vocab_size
    definition = LossDefinition(label_smoothing, ignore_index, vocab, group)
    check_loss_arguments((*parallel_logits.shape[:-1], parallel_logits.shape[-1] * group.size), labels, definition)
    labels = labels.long()
    if group.size > 1:
        return _ParallelCrossEntropy.apply(parallel_logits, labels, definition)
    wide = at_least_float32(parallel_logits if vocab_size is None else parallel_logits[..., :vocab_size])
    return F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]),
        labels.reshape(-1),
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        reduction="none",
    ).view(labels.shape)


def check_loss_arguments(logits_shape: tuple[int, ...], labels: Tensor, definition: LossDefinition) -> None:
    """Check the arguments before anything is computed or sent."""
    if logits_shape[:-1] != labels.shape:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not match logits of shape {logits_shape}; expected "
            f"{logits_shape[:-1]}"
        )
    if labels.is_floating_point():
        raise ValueError(f"labels of dtype {labels.dtype} are not token ids; expected integers")
    if not 0.0 <= definition.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={definition.label_smoothing} is outside [0, 1]")
    vocab, ignore_index = definition.vocab_size, definition.ignore_index
    if not 0 < vocab <= logits_shape[-1]:
        raise ValueError(f"vocab_size={vocab} does not fit {logits_shape[-1]} logits; use 1..{logits_shape[-1]}")
    # Elsewhere a inspect the values would stall the device.
    if labels.is_cpu and not torch.compiler.is_compiling():
        wrong = ((labels < 0) | (labels >= vocab)) & (labels != ignore_index)
        if wrong.any():
            raise ValueError(
                f"label {int(labels[wrong][0])} is outside the vocabulary 0..{vocab - 1} and is not "
                f"ignore_index={ignore_index}"
            )


@leaf_of_traces
def token_log_probs(
    parallel_logits: Tensor, tokens: Tensor, *, ignore_index: int = -100, vocab_size: int | None = None
) -> Tensor:
    """The log-probability of each token.

    Args:
        parallel_logits: `[..., vocab/tp]`, any float dtype; half precision is computed in float32. Not changed. Divide
            them by the temperature first, if there is one.
        tokens: `[...]` integer: ids in the whole vocabulary.
        ignore_index: an id that stands for no token.
        vocab_size: number of tokens, if the logits' dim is padded.

    Returns:
        `[...]`, float32 or float64, the same on every rank; 0 and without gradient where the token is `ignore_index`.
        For a text, give `logits[:, :-1]` and `tokens[:, 1:]`.

    Raises:
        ValueError: see `parallel_cross_entropy`.
    """
    return -parallel_cross_entropy(parallel_logits, tokens, ignore_index=ignore_index, vocab_size=vocab_size)


@leaf_of_traces
def entropy(parallel_logits: Tensor, *, vocab_size: int | None = None) -> Tensor:
    """The entropy of the tokens' distribution, in nats.

    Args:
        parallel_logits: `[..., vocab/tp]`, any float dtype; half precision is computed in float32. Not changed. Minus
            infinity is a probability of zero.
        vocab_size: number of tokens, if the logits' dim is padded.

    Returns:
        `[...]`, float32 or float64, the same on every rank.

    Raises:
        ValueError: a vocab_size of more than there are logits.
    """
    group = active_group("tp")
    num_logits = parallel_logits.shape[-1] * group.size
    vocab = num_logits if vocab_size is None else vocab_size
    if not 0 < vocab <= num_logits:
        raise ValueError(f"vocab_size={vocab} does not fit {num_logits} logits; use 1..{num_logits}")
    result: Tensor = _Entropy.apply(parallel_logits, LossDefinition(0.0, -100, vocab, group))
    return result


class _Entropy(Function):
    """H = log Z - sum(p x) of logits x, with p = exp(x) / Z; two all-reduces forward, none backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, definition: LossDefinition) -> Tensor:
        group, padding = definition.group, definition.padding_of(logits)
        largest = all_reduce_(at_least_float32(largest_logits(logits, padding)), group, op="max")
        shifted = fill_padding(logits - largest.unsqueeze(-1), padding, -torch.inf)
        exponentials = shifted.exp()
        shifted = shifted.masked_fill(exponentials == 0, 0.0)  # what has no probability has no part in the sum
        normalizer, weighted = all_reduce_(
            torch.stack([exponentials.sum(dim=-1), (exponentials * shifted).sum(dim=-1)]), group
        )
        result: Tensor = normalizer.log() - weighted / normalizer
        ctx.save_for_backward(exponentials, shifted, normalizer, result)
        ctx.dtype = logits.dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_entropy: Tensor) -> tuple[Tensor, None]:
        exponentials, shifted, normalizer, result = ctx.saved_tensors
        log_probs = shifted - normalizer.log().unsqueeze(-1)
        scale = (-grad_entropy / normalizer).unsqueeze(-1)
        return (scale * exponentials * (log_probs + result.unsqueeze(-1))).to(ctx.dtype), None
