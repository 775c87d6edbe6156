"""Conversations with pictures for the small vision-language models: rows, and the inputs of microbatches of rows."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from nxd_parity import InFloat64
from nxd_pipeline import Microbatches
from PIL import Image

from hf_survey.vision import vision_processor

NUM_PICTURES = (1, 2, 0, 0, 0, 3, 1, 0)  # of each row; rows 2 and 3 can be a microbatch without any
_NUM_PICTURES_OF = {
    # Its processor wants pictures in all rows, or in none.
    "paligemma": (1, 2, 1, 1, 2, 3, 1, 1),
    # The same; and what tokens before the first picture compute depends on how many the other rows have.
    "mllama": (2,) * 8,
}
LABELS_PER_ROW = 16.0  # what losses are divided by, the same for all layouts, however many labels a row has
_SIZES = ((40, 30), (64, 48), (31, 70), (20, 20))  # of pictures in turn, width and height
_IGNORED = -100


def vision_inputs(family: str, parts: Sequence[Sequence[int]], *, pictures: bool = True) -> dict[str, Any]:
    """Return the inputs of a batch, each split into microbatches, in float64.

    Args:
        family: one of `VISION_FAMILIES`.
        parts: the numbers of the rows of each microbatch, below 8.
        pictures: whether rows have pictures.
    """
    with InFloat64():  # processors keep means and deviations of pixels in the dtype that is the default at the first
        microbatches = [_inputs(family, tuple(rows), pictures) for rows in parts]
    names = dict.fromkeys(name for it in microbatches for name in it)
    return {name: Microbatches([it.get(name) for it in microbatches]) for name in names}


def picture(number: int) -> Image.Image:
    """Return a picture of noise; its size depends on the number."""
    width, height = _SIZES[number % len(_SIZES)]
    values = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def _inputs(family: str, rows: tuple[int, ...], pictures: bool) -> dict[str, Any]:
    processor = _processor(family)
    texts, images = zip(*(_row(family, row, pictures) for row in rows), strict=True)
    given: dict[str, Any] = {"images": list(images)} if any(images) else {}
    if not given and family == "paligemma":  # its processor wants pictures
        processor = processor.tokenizer
    length = _length(family, pictures)
    made = processor(
        text=list(texts), **given, padding="max_length", max_length=length, return_tensors="pt", padding_side="right"
    )
    inputs = {name: it.double() if it.is_floating_point() else it for name, it in made.items() if name != "labels"}
    ids = inputs["input_ids"]
    is_learned = inputs["attention_mask"].bool() & (ids < _first_special(family))
    inputs["labels"] = torch.where(is_learned, ids, _IGNORED)
    inputs["num_items_in_batch"] = torch.tensor(LABELS_PER_ROW * len(rows))
    return inputs


def _row(family: str, row: int, pictures: bool) -> tuple[str, list[Image.Image]]:
    """Return the text of a conversation, with placeholders, and its pictures."""
    numbers = _NUM_PICTURES_OF.get(family, NUM_PICTURES)
    images = [picture(row + index) for index in range(numbers[row])] if pictures else []
    question = [*({"type": "image"} for _ in images), {"type": "text", "text": "What is in the image?" * (1 + row % 2)}]
    answer = [{"type": "text", "text": "a red square and two blue circles"[: 8 + 3 * row]}]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _processor(family).apply_chat_template(messages, tokenize=False), images


@cache
def _processor(family: str) -> Any:
    return vision_processor(family)


@cache
def _length(family: str, pictures: bool) -> int:
    """Return the tokens of the longest row, filled up to a number that two ranks can split."""
    processor, longest = _processor(family), 0
    for row in range(len(NUM_PICTURES)):
        text, images = _row(family, row, pictures)
        if images or family != "paligemma":
            longest = max(longest, len(processor(text=[text], images=[images] if images else None)["input_ids"][0]))
        else:
            longest = max(longest, len(processor.tokenizer([text])["input_ids"][0]))
    return longest + longest % 2


@cache
def _first_special(family: str) -> int:
    """Return the first id of the special tokens around and inside images, which are not learned."""
    tokenizer = _processor(family).tokenizer
    return min(id for id, token in tokenizer.added_tokens_decoder.items() if id > 6)
