"""Puts the images of a conversation into its text, as the model's processor does, and keeps spans of the text right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nxd_data.content_parts import ImageSource, text_of
from nxd_data.image_processor import ImageProcessor, Spans
from nxd_data.images import decode_image
from nxd_data.rendering import MessageLostError
from nxd_data.stored_images import EncodedImage, ImageFiles


class ConversationImages:
    """The images of a conversation, on their way into its text.

    Args:
        processor: the model's processor.
        images: the images.
        files: reads images.

    Raises:
        ValueError: an image cannot be read, or a text spells the token that stands for an image.
    """

    def __init__(self, processor: ImageProcessor, images: Sequence[ImageSource], files: ImageFiles | None) -> None:
        if files is None:
            raise ValueError("images are not supported here; leave them out")
        self._processor = processor
        self._read = [files.read(source) for source in images]
        self._sizes, self._replacements = [], []
        for source, (content, _, _) in zip(images, self._read, strict=True):
            image = decode_image(source.place, content)
            self._sizes.append(image.size)
            try:
                self._replacements.append(processor.replacement(image))
            except ValueError as error:
                raise ValueError(f"{source.place}: {error}") from error

    def take_places(self, text: str, spans: Spans) -> tuple[str, Spans, Spans]:
        """Return a text with what the processor makes of the images, the same spans in it, and those of the images."""
        found = text.count(self._processor.token)
        if found != len(self._replacements):
            raise MessageLostError(
                f"its {len(self._replacements)} images become {found} times {self._processor.token!r} in the chat "
                "template's text; remove this token from the texts, or use a template that renders images"
            )
        expanded, old, new = self._processor.expand(text, self._replacements)
        return expanded, [(_moved(start, old, new), _moved(end, old, new)) for start, end in spans], new

    def encoded(self, bounds: Sequence[tuple[int, int]]) -> list[EncodedImage]:
        """Return the images with the bounds of their tokens."""
        each = zip(self._read, self._sizes, bounds, strict=True)
        return [EncodedImage(source, size, start, end) for source, size, (start, end) in each]


def _moved(position: int, old: Spans, new: Spans) -> int:
    """Return where a position of a text is after its spans were replaced."""
    before = sum(end <= position for _, end in old)
    return position + (new[before - 1][1] - old[before - 1][1] if before else 0)


def check_no_image_token(place: str, processor: ImageProcessor, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if messages without images spell the token that stands for one."""
    if any(processor.token in text_of(message) for message in messages):
        raise ValueError(
            f"{place} spells {processor.token!r}, which stands for an image, but has no images; remove it, or give a "
            "column images"
        )
