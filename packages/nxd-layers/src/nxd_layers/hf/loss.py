"""The causal language model's loss from logits that stay split along the vocabulary.

While a model whose head is split computes a loss, the head does not gather the logits, and the loss function takes them
split. At every layout the loss is 0 where no token has a label; that of transformers is nan.
"""

import inspect
from typing import Any

from nxd_state import num_labels, takes_causal_lm_loss
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.cross_entropy import parallel_cross_entropy
from nxd_layers.hf.transformers_models import adds_z_loss, output_embeddings
from nxd_layers.linear import ColumnParallelLinear


def split_loss(model: Any) -> None:
    """Have the model compute its loss without whole logits, if it computes one the ordinary way."""
    head = output_embeddings(model)
    if not isinstance(head, ColumnParallelLinear) or not takes_causal_lm_loss(model):
        return
    if adds_z_loss(model):  # of whole logits, which its forward takes from the head
        return
    loss = SplitLoss(head, model.loss_function)
    model.loss_function = loss
    model.register_forward_pre_hook(loss.begin, with_kwargs=True)
    model.register_forward_hook(loss.end, always_call=True)


class SplitLoss:
    """The model's loss function, and what goes before and after the forward that calls it."""

    def __init__(self, head: ColumnParallelLinear, of_whole_logits: Any) -> None:
        self._head = head
        self._of_whole_logits = of_whole_logits

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """With labels, the head leaves its logits split."""
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        self._head.gather_output = given.get("labels") is None

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """Whatever else is computed with the head gets whole logits."""
        self._head.gather_output = True

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The mean loss of the next tokens, in float32 or, from float64 logits, in float64.

        Args:
            logits: `[batch, seq, vocab/tp]` while the model computes a loss, or else `[batch, seq, vocab]`.
            labels: `[batch, seq]`, those of the tokens themselves.
            vocab_size: number of tokens.
            num_items_in_batch: divides the sum of the losses, instead of the number of labels here.
            ignore_index: label of tokens without loss.
            shift_labels: `[batch, seq]`, those of the next tokens, instead of `labels`.
            **kwargs: for the loss of whole logits.
        """
        if self._head.gather_output:
            loss: Tensor = self._of_whole_logits(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
            return loss
        if shift_labels is None:
            if labels is None:
                raise ValueError("the loss needs labels or shift_labels; neither is given")
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(logits.device)
        losses = parallel_cross_entropy(
            logits, shift_labels, ignore_index=ignore_index, vocab_size=self._head.output_size
        )
        count = num_labels(shift_labels, ignore_index, num_items_in_batch)
        return losses.sum() / (count.to(losses.device) if isinstance(count, Tensor) else count)
