"""Converts users' prompts to lists of token ids."""

from collections.abc import Iterable
from operator import index
from typing import Any

from torch import Tensor


def read_prompt(prompt: Any, vocab_size: int) -> list[int]:
    """The ids of one prompt, checked.

    Args:
        prompt: a sequence of ids, or a tensor or array `[seq]` of integers.
        vocab_size: one more than the largest id.

    Raises:
        TypeError: it is nothing of the kind.
        ValueError: it is empty, or has an id outside the vocabulary.
    """
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"a prompt is {prompt!r}, a {type(prompt).__name__}; expected a list of token ids")
    try:
        ids = [index(token) for token in values]
    except TypeError as error:
        raise TypeError(f"a prompt holds values that are not token ids: {error}") from error
    if not ids:
        raise ValueError("the prompt is empty; pass at least one token")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary 0..{vocab_size - 1}")
    return ids


def unpad_prompts(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The tokens of each row, without its padding.

    Args:
        input_ids: `[batch, seq]`.
        attention_mask: `[batch, seq]`, 1 for tokens and 0 for padding, on the left or on the right of each row.

    Raises:
        ValueError: other shapes, a row of padding only, or padding between tokens.
    """
    if input_ids.dim() != 2 or attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)}; expected "
            "[batch, seq] for both"
        )
    prompts = []
    for row, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
        at = mask.nonzero().flatten().tolist()
        if not at:
            raise ValueError(f"row {row} of attention_mask is 0 everywhere; each prompt needs at least one token")
        if at[-1] - at[0] + 1 != len(at):
            raise ValueError(f"row {row} of attention_mask has padding between tokens; pad on the left or on the right")
        prompts.append([int(token) for token in ids[at]])
    return prompts
