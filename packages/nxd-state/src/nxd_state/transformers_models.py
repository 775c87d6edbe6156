"""What layers and pipelines both ask of models of transformers: whether a model is one, its parts, and its loss.

The loss of causal language models is nan where no token has a label; here it is 0, because a pipeline's microbatch may
have no labels. transformers is not imported: classes and loss functions are recognized by their names.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn


def is_transformers_model(model: object) -> bool:
    """Whether an object is a model of transformers."""
    return has_transformers_base(model, "PreTrainedModel")


def is_peft_model(model: object) -> bool:
    """Whether PEFT has added adapters to a model; asked of its attributes, since PEFT may not be installed."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def transformers_model_in(model: Any) -> Any:
    """Return the model of transformers that PEFT has added adapters to, or else the model itself."""
    return model.get_base_model() if is_peft_model(model) else model


def has_transformers_base(thing: object, name: str) -> bool:
    """Whether an object's class is a class of transformers with this name, or is derived from it."""
    return any(
        cls.__name__ == name and cls.__module__.partition(".")[0] == "transformers" for cls in type(thing).__mro__
    )


def is_multimodal(model: Any) -> bool:
    """Whether a model has a language model and encoders of something else, such as images, each with its config."""
    return is_transformers_model(model) and model.config.get_text_config() is not model.config


def find_towers(model: Any) -> list[str]:
    """Return the paths of the largest modules, and of single parameters, outside of a model's language model.

    They are found by what transformers says of the model (its decoder, its embeddings and its head), not by names.

    Args:
        model: a model of transformers, which may be on the meta device.

    Returns:
        The paths in the model's order, such as ["model.vision_tower", "model.multi_modal_projector"]; empty for a
        model of text alone, and for one that names no decoder.
    """
    if not is_multimodal(model):
        return []
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        return []
    parts = (decoder, model.get_input_embeddings(), model.get_output_embeddings())
    return list(_outside(model, "", [part for part in parts if part is not None]))


def _outside(module: nn.Module, path: str, kept: Sequence[nn.Module]) -> Iterator[str]:
    if any(part is module for part in kept):
        return
    inner = set(module.modules())
    if not any(part in inner for part in kept):
        if any(True for _ in module.parameters()):
            yield path
        return
    prefix = f"{path}." if path else ""
    for name, _ in module.named_parameters(recurse=False):
        yield prefix + name
    for name, child in module.named_children():
        yield from _outside(child, prefix + name, kept)


def takes_causal_lm_loss(model: Any) -> bool:
    """Whether the model's forward calls its `loss_function`, and that is the one of causal language models."""
    forward = inspect.unwrap(type(model).forward)
    calls_it = "loss_function" in forward.__code__.co_names
    return calls_it and getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


def use_loss_over_labels(model: Any) -> None:
    """Make a model's causal language modeling loss 0 if no token has a label; other models are unchanged."""
    if takes_causal_lm_loss(model):
        model.loss_function = LossOverLabels(model.loss_function)


class LossOverLabels:
    """A causal language model's loss function that is 0 where there are no labels."""

    def __init__(self, of_whole_logits: Any) -> None:
        self._of_whole_logits = of_whole_logits

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
        """The mean loss of the next tokens, 0-d.

        Args:
            logits: `[batch, seq, vocab]`.
            labels: `[batch, seq]`, not shifted; may be None if `shift_labels` is given.
            vocab_size: number of tokens.
            num_items_in_batch: the divisor of the sum; the number of tokens with a label if None.
            ignore_index: the label of tokens that do not count.
            shift_labels: `[batch, seq]`, at each place the token that comes next.
            **kwargs: passed on.
        """
        counted = shift_labels if shift_labels is not None or labels is None else labels[..., 1:]
        if counted is not None:
            num_items_in_batch = num_labels(counted, ignore_index, num_items_in_batch)
        loss: Tensor = self._of_whole_logits(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
        return loss


def num_labels(shift_labels: Tensor, ignore_index: int, num_items: Tensor | int | None = None) -> Tensor | int:
    """The number of tokens with a label, or the given number; 1 instead of 0, to divide by."""
    count = (shift_labels != ignore_index).sum() if num_items is None else num_items
    return count + (count == 0)
