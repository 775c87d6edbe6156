"""The causal language model's loss over tensor-parallel and over context-parallel ranks.

While a model whose head is sharded computes a loss, the head does not gather the logits, and the loss function takes
them sharded along the vocabulary. Where sequences are split, the loss is that of all ranks' positions. At every layout
the loss is 0 if no token has a label; that of transformers is nan. The logits that the model returns with its loss stay
sharded, or are gathered afterwards.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

from nxd_state import active_group, all_reduce, num_labels, takes_causal_lm_loss
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.context import sum_over_contexts
from nxd_layers.cross_entropy import parallel_cross_entropy
from nxd_layers.hf.context_forward import current_forward
from nxd_layers.hf.transformers_models import adds_z_loss, output_embeddings
from nxd_layers.linear import ColumnParallelLinear, gathered_output

IGNORED_LABEL = -100

WholeLogits = Literal["whole_logits"]


def check_vocabulary_parallel_loss(choice: object) -> None:
    """Raise a ValueError for what `parallelize` does not take as `vocabulary_parallel_loss`."""
    if not isinstance(choice, bool) and choice not in get_args(WholeLogits):
        raise ValueError(f"unknown vocabulary_parallel_loss={choice!r}; use True, False or 'whole_logits'")


def use_vocabulary_parallel_loss(model: Any, *, whole_logits: bool = False) -> None:
    """Have the model compute its loss from sharded logits, if it uses the usual loss function.

    Args:
        model: a model of transformers, whose layers are sharded.
        whole_logits: whether it returns whole logits with the loss.
    """
    head = output_embeddings(model)
    if not isinstance(head, ColumnParallelLinear) or not takes_causal_lm_loss(model):
        return
    if adds_z_loss(model):  # of full logits, which its forward takes from the head
        return
    loss = VocabularyParallelLoss(head, model.loss_function, whole_logits=whole_logits)
    model.loss_function = loss
    model.register_forward_pre_hook(loss.begin, with_kwargs=True)
    model.register_forward_hook(loss.end, always_call=True)


class VocabularyParallelLoss:
    """The model's loss function, with the hooks that leave the head's logits sharded for it.

    Args:
        head: the layer that computes the logits.
        full_logits_loss: the model's own loss function, of logits `[batch, seq, vocab]`.
        whole_logits: whether to gather the logits that the model returns with a loss.
    """

    def __init__(self, head: ColumnParallelLinear, full_logits_loss: Any, *, whole_logits: bool) -> None:
        self._head = head
        self._full_logits_loss = full_logits_loss
        self._whole_logits = whole_logits

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Leave the head's logits sharded if there are labels."""
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        self._head.gather_output = given.get("labels") is None

    def end(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Have the head gather its logits again, for whatever else uses it; returns the output with whole logits."""
        was_sharded = not self._head.gather_output
        self._head.gather_output = True
        if not (self._whole_logits and was_sharded) or output is None:  # None if the forward has failed
            return output
        if isinstance(output, tuple):  # return_dict=False
            loss, logits, *others = output
            return loss, gathered_output(logits, self._head), *others
        if getattr(output, "logits", None) is not None:  # a forward that a script has replaced may have none
            output.logits = gathered_output(output.logits, self._head)
        return output

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED_LABEL,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean loss of the next tokens, in float32 or, from float64 logits, in float64.

        Args:
            logits: `[batch, seq, vocab/tp]` while the model computes a loss, or else `[batch, seq, vocab]`.
            labels: `[batch, seq]`, the labels of the tokens themselves.
            vocab_size: number of tokens in the vocabulary.
            num_items_in_batch: divisor of the sum of the losses; the number of labels here if None.
            ignore_index: label of tokens without loss.
            shift_labels: `[batch, seq]`, the labels of the next tokens, instead of `labels`.
            **kwargs: arguments for the loss of full logits.
        """
        if self._head.gather_output:
            loss: Tensor = self._full_logits_loss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
            return loss
        if shift_labels is None:
            if labels is None:
                raise ValueError("the loss needs labels or shift_labels; pass one of them")
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(logits.device)
        losses = parallel_cross_entropy(
            logits, shift_labels, ignore_index=ignore_index, vocab_size=self._head.output_size
        )
        count = num_labels(shift_labels, ignore_index, num_items_in_batch)
        return losses.sum() / (count.to(losses.device) if isinstance(count, Tensor) else count)


class ContextLoss:
    """The model's loss function over all ranks' positions; see `sum_over_contexts` for its gradients."""

    def __init__(self, local_loss: Callable[..., Tensor]) -> None:
        self._local_loss = local_loss

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED_LABEL,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean over the labels of all positions, 0-d, the same on all context-parallel ranks.

        Args:
            logits: `[batch, local, vocab]`, or as the model's own loss function takes them.
            labels: the labels that the model was given.
            vocab_size: an argument of the model's own loss function.
            num_items_in_batch: divisor of the sum of the losses; the number of labels if None.
            ignore_index: label of tokens without loss.
            **kwargs: further arguments of the model's own loss function.
        """
        forward = current_forward.get()
        if forward is None:
            return self._local_loss(
                logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, **kwargs
            )
        assert forward.shift_labels is not None  # a loss is asked for with labels
        if num_items_in_batch is None:
            num_items_in_batch = all_reduce((forward.shift_labels != ignore_index).sum(), active_group("cp"))
        num_items_in_batch = num_items_in_batch + (num_items_in_batch == 0)
        loss = self._local_loss(
            logits,
            None,
            vocab_size,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            **{**kwargs, "shift_labels": forward.shift_labels},
        )
        return sum_over_contexts(loss)
