"""Puts the images of a conversation into its text, as the model's processor does, and keeps spans of the text right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nxd_data.content_parts import ImageSource
from nxd_data.image_processor import ImageProcessor, Spans
from nxd_data.images import decode_image
from nxd_data.rendering import MessageLostError
from nxd_data.stored_images import EncodedImage, ImageContent, ImageFiles

MAX_TOKENS = 1 << 20  # of the images of a conversation; their text takes some twenty bytes each


class _Read(NamedTuple):
    """An image that has been read; its pixels are gone, and its content, if it has a file."""

    source: ImageContent
    size: tuple[int, int]
    replacement: str
    num_tokens: int


class ConversationImages:
    """The images of a conversation, on their way into its text.

    One image is in memory at a time, and equal ones are read once.

    Args:
        processor: the model's processor.
        images: the images.
        files: reads images.

    Raises:
        ValueError: an image cannot be read, or they take too many tokens together.
    """

    def __init__(self, processor: ImageProcessor, images: Sequence[ImageSource], files: ImageFiles | None) -> None:
        if files is None:
            raise ValueError("images are not supported here; leave them out")
        self._processor = processor
        self._read: list[_Read] = []
        known: dict[tuple[str | None, bytes | None], _Read] = {}
        num_tokens = 0
        for source in images:
            key = (source.written, source.content)
            if key not in known:
                known[key] = _read(processor, source, files)
            self._read.append(known[key])
            num_tokens += known[key].num_tokens
            if num_tokens > MAX_TOKENS:
                raise ValueError(
                    f"{source.place}: the images up to this one take {num_tokens:,} tokens, and a conversation may "
                    f"have {MAX_TOKENS:,}; give it fewer or smaller images"
                )

    def take_places(self, text: str, spans: Spans) -> tuple[str, Spans, Spans]:
        """Return a text with what the processor makes of the images, the same spans in it, and those of the images."""
        check_text(self._processor, text, len(self._read))
        expanded, old, new = self._processor.expand(text, [it.replacement for it in self._read])
        return expanded, [(_moved(start, old, new), _moved(end, old, new)) for start, end in spans], new

    def encoded(self, bounds: Sequence[tuple[int, int]]) -> list[EncodedImage]:
        """Return the images with the bounds of their tokens."""
        each = zip(self._read, bounds, strict=True)
        return [EncodedImage(it.source, it.size, start, end) for it, (start, end) in each]


def _read(processor: ImageProcessor, source: ImageSource, files: ImageFiles) -> _Read:
    content = files.read(source)
    assert content.content is not None
    image = decode_image(source.place, content.content)
    try:
        replacement = processor.replacement(image)
    except ValueError as error:
        raise ValueError(f"{source.place}: {error}") from error
    if content.name is not None:
        content = content._replace(content=None)
    return _Read(content, image.size, replacement, replacement.count(processor.feature_token))


def _moved(position: int, old: Spans, new: Spans) -> int:
    """Return where a position of a text is after its spans were replaced."""
    before = sum(end <= position for _, end in old)
    return position + (new[before - 1][1] - old[before - 1][1] if before else 0)


def check_num_images(place: str, num_images: int, sequence_length: int | None) -> None:
    """Raise ValueError if images, each of a token or more, cannot all be in a sequence; None is any length."""
    if sequence_length is not None and num_images > sequence_length:
        raise ValueError(
            f"{place} has {num_images:,} images, but each takes a token or more of data.sequence_length="
            f"{sequence_length}; give it fewer images, or raise the length"
        )


def check_text(processor: ImageProcessor, text: str, num_images: int) -> None:
    """Raise MessageLostError unless a rendered text has the tokens of its images alone."""
    try:
        processor.check_text(text, num_images)
    except ValueError as error:
        raise MessageLostError(str(error)) from error
