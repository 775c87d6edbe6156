"""Log-probabilities of tokens, and entropies, from logits that are split along the vocabulary.

Losses over preferences and rewards are made of them (Rafailov et al. 2023; Schulman et al. 2017). As in
`cross_entropy`, ranks exchange a few numbers per token, and the whole logits exist nowhere.
"""

from typing import Any

import torch
from nxd_state import active_group, all_reduce_
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nxd_layers.cross_entropy import LossDefinition, fill_padding, largest_logits, parallel_cross_entropy, widened
from nxd_layers.tracing import leaf_of_traces


@leaf_of_traces
def token_log_probs(
    parallel_logits: Tensor, tokens: Tensor, *, ignore_index: int = -100, vocab_size: int | None = None
) -> Tensor:
    """The logarithm of the probability that logits give to each token.

    Args:
        parallel_logits: `[..., vocab/tp]`, any float dtype; half precision is computed in float32. Not changed. Divide
            them by a temperature before, if there is one.
        tokens: `[...]` integer: ids in the whole vocabulary.
        ignore_index: an id that stands for no token.
        vocab_size: number of tokens, if the logits' dim is padded.

    Returns:
        `[...]`, float32 or float64, the same on every rank; 0 and without gradient where the token is `ignore_index`.
        For a text, give `logits[:, :-1]` and `tokens[:, 1:]`.

    Raises:
        ValueError: as for `parallel_cross_entropy`.
    """
    return -parallel_cross_entropy(parallel_logits, tokens, ignore_index=ignore_index, vocab_size=vocab_size)


@leaf_of_traces
def entropy(parallel_logits: Tensor, *, vocab_size: int | None = None) -> Tensor:
    """The entropy of the distribution that logits give, in nats.

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
        largest = all_reduce_(widened(largest_logits(logits, padding)), group, op="max")
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
