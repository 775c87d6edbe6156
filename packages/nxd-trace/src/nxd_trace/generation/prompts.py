"""Ragged prompts out of padded tensors, as tokenizers of Hugging Face give them."""

from torch import Tensor


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
            "[batch, seq] of both"
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
