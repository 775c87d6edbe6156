"""The loss of a model of transformers whose sequences are cut: of all ranks' positions."""

from collections.abc import Callable
from typing import Any

from nxd_state import active_group, all_reduce
from torch import Tensor

from nxd_layers.context import sum_over_contexts
from nxd_layers.hf.context_forward import forward_under_way

IGNORED_LABEL = -100


class ContextLoss:
    """The model's loss function, of all ranks' positions; see `sum_over_contexts` for its gradients."""

    def __init__(self, of_positions_here: Callable[..., Tensor]) -> None:
        self._of_positions_here = of_positions_here

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED_LABEL,
        **kwargs: Any,
    ) -> Tensor:
        """The mean over the labels of all positions, 0-d, the same on all context-parallel ranks.

        Args:
            logits: `[batch, local, vocab]`, or what the loss function takes.
            labels: as the model was given them.
            vocab_size: for the loss function.
            num_items_in_batch: divides the sum of the losses, instead of the number of labels.
            ignore_index: label of tokens without loss.
            **kwargs: for the loss function.
        """
        forward = forward_under_way.get()
        if forward is None:
            return self._of_positions_here(
                logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, **kwargs
            )
        assert forward.shift_labels is not None  # a loss is asked for with labels
        if num_items_in_batch is None:
            num_items_in_batch = all_reduce((forward.shift_labels != ignore_index).sum(), active_group("cp"))
        num_items_in_batch = num_items_in_batch + (num_items_in_batch == 0)
        loss = self._of_positions_here(
            logits,
            None,
            vocab_size,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            **{**kwargs, "shift_labels": forward.shift_labels},
        )
        return sum_over_contexts(loss)
