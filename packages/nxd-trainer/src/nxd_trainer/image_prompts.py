"""Prompts with images: their tokens, and what the model reads in the places of their images."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nxd_data.chat import ChatTemplate
from nxd_data.image_processor import ImageProcessor
from nxd_data.images import MAX_PIXELS, decode_image
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

_PROBE_SIZE = (96, 64)


class ImagePrompts(Generic[T]):
    """Reads prompts with images. May be used by several threads, one of which reads images at a time.

    Args:
        processor: the model's image processor.
        chat: its chat template, if it has one.
        read: function from `input_ids` `[1, tokens]` and the inputs of the model's images to what it reads.
    """

    def __init__(
        self, processor: ImageProcessor, chat: ChatTemplate | None, read: Callable[[Mapping[str, Tensor]], T]
    ) -> None:
        self._processor = processor
        self._chat = chat
        self._read = read
        self._lock = threading.Lock()

    def encode_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[tuple[str, bytes]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        longest: int | None = None,
    ) -> tuple[list[int], T]:
        """Return the tokens of a conversation for the assistant to answer, and what is read for its images.

        Args:
            messages: messages whose content may be a list of parts.
            images: place and encoded content of the image of each image part, in order.
            tools: as for `ChatTemplate.encode_prompt`.
            variables: as for `ChatTemplate.encode_prompt`.
            longest: the most tokens that are of use; the images of a longer prompt are not read.

        Raises:
            ValueError: an image cannot be read, the template refuses the conversation, or it has too many tokens.
            LookupError: as for `ChatTemplate.encode_prompt`.
        """
        if self._chat is None:
            raise ValueError("the model has no chat template, which conversations need")
        text = self._chat.render_prompt(messages, tools, variables)
        with self._lock:
            return self._encode(text, images, longest, is_whole=True)

    def encode_text(self, text: str, images: Sequence[tuple[str, bytes]]) -> tuple[list[int], T]:
        """Like `encode_prompt`, for a text to continue.

        The images come before it, unless it has the processor's token for each image.
        """
        token = self._processor.token
        with_tokens = text if text.count(token) == len(images) else token * len(images) + text
        with self._lock:
            return self._encode(with_tokens, images, None, is_whole=False)

    def _encode(
        self, text: str, images: Sequence[tuple[str, bytes]], longest: int | None, *, is_whole: bool
    ) -> tuple[list[int], T]:
        inputs = self._processor.prompt(text, _decoded(images), add_special_tokens=not is_whole)
        tokens = inputs["input_ids"][0].tolist()
        if longest is not None and len(tokens) > longest:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens with its images, more than the {longest} that fit; send fewer or "
                "smaller images"
            )
        return tokens, self._read(inputs)


def probe_inputs(processor: ImageProcessor) -> dict[str, Tensor]:
    """Return the inputs of a prompt with a gray image and some text."""
    from PIL import Image  # noqa: PLC0415 - optional; the processor has needed it already

    return processor.prompt(f"{processor.token} a", [Image.new("RGB", _PROBE_SIZE, "gray")])


def _decoded(images: Sequence[tuple[str, bytes]]) -> list[Image]:
    """Decode images to RGB; raises ValueError also if they have too many pixels together."""
    decoded: list[Image] = []
    num_pixels = 0
    for place, content in images:
        decoded.append(decode_image(place, content))
        num_pixels += decoded[-1].width * decoded[-1].height
        if num_pixels > MAX_PIXELS:
            raise ValueError(
                f"{place}: the images have more than {MAX_PIXELS:,} pixels together; send fewer or smaller ones"
            )
    return decoded
