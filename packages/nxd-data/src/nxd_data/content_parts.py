"""Contents of messages that have images: parts of text and images, and the images of a row in order.

A content without an image is a string everywhere else. A content with one is a list of parts, `{"type": "text", "text":
...}` and `{"type": "image"}`, as chat templates take them; until `take_images` a part also names its image.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Keys of an image part whose value is the image: transformers', and OpenAI's.
IMAGE_KEYS = ("image", "path", "url", "image_url", "base64")
IMAGE_COLUMNS = ("images", "image")
# What texts of LLaVA's datasets have in the places of images.
PLACEHOLDER = "<image>"

_OTHER_KINDS = re.compile(r"(input_)?(video|audio|file)(_url)?")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ImageSource:
    """An image as a row has it."""

    place: str  # its location in the data, for messages
    written: str | None = None  # path, URL or data URI
    content: bytes | None = None  # content of its file


def parts_of(place: str, content: Sequence[object]) -> list[dict[str, Any]]:
    """Read the parts of a content: texts, and images with their sources.

    Raises:
        ValueError: a part is something else.
    """
    return [_part(f"{place}: content[{index}]", part) for index, part in enumerate(content)]


def _part(place: str, part: object) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise ValueError(f"{place} is a {type(part).__name__}; expected an object with type, text or image")
    given = {key: value for key, value in part.items() if value is not None}  # tables add nulls for keys of other rows
    kind = given.get("type")
    if kind == "text" and isinstance(given.get("text"), str):
        return {"type": "text", "text": given["text"]}
    if kind in ("image", "image_url", "input_image"):
        named = [key for key in IMAGE_KEYS if key in given]
        if len(named) > 1:
            raise ValueError(f"{place} has {' and '.join(named)}; give an image once")
        if not named and kind != "image":
            raise ValueError(f"{place} has the type {kind} without image_url; give it, or use the type image")
        return {"type": "image", "image": source_of(place, given[named[0]], named[0]) if named else None}
    if isinstance(kind, str) and _OTHER_KINDS.fullmatch(kind):
        raise ValueError(f"{place} has the type {kind!r}; only text and images can be trained on, so leave it out")
    raise ValueError(f"{place} has the type {str(kind)[:40]!r}; expected a part of the type text or image")


def source_of(place: str, value: object, key: str = "image") -> ImageSource:
    """Read an image: a path or data URI, bytes, or an object with one of these, as datasets has it.

    Raises:
        ValueError: the value is something else.
    """
    if isinstance(value, Mapping):
        given = {name: it for name, it in value.items() if it is not None}
        found = next((given[name] for name in ("bytes", "path", "url") if name in given), None)
        if found is None:
            raise ValueError(f"{place}: {key} has neither bytes nor a path; give one of them")
        value = found
    if isinstance(value, str):
        return ImageSource(place, written=f"data:image/png;base64,{value}" if key == "base64" else value)
    if isinstance(value, bytes | bytearray):
        return ImageSource(place, content=bytes(value))
    shown = "nothing" if value is None else f"a {type(value).__name__}"
    raise ValueError(f"{place}: {key} is {shown}; expected a path, a data URI, or an object with bytes or path")


def take_images(
    place: str, row: Mapping[str, Any], messages: Sequence[Message]
) -> tuple[list[Message], tuple[ImageSource, ...]]:
    """Return messages whose image parts name no image, and the images in order.

    Parts without an image of their own take those of the column `images` or `image` in order. If there are no image
    parts at all, texts may have `<image>` in their places, once for each image; without one, images come before the
    first message of the user.

    Raises:
        ValueError: the numbers of parts, or of `<image>`, and images differ, or the column holds something else.
    """
    column = next((name for name in IMAGE_COLUMNS if row.get(name) not in (None, [])), None)
    listed = [] if column is None else _listed(place, column, row[column])
    if not has_images(messages) and any(row.get(name) is not None for name in IMAGE_COLUMNS):
        messages = _with_parts(place, messages, len(listed))
    bare = [part for part in _images(messages) if part.get("image") is None]
    if len(bare) != len(listed):
        found = f"{len(listed)} in the column {column}" if column else "no column images"
        raise ValueError(f"{place} has {len(bare)} image parts without an image, but {found}; give one for each part")
    remaining = iter(listed)
    images = (next(remaining) if part.get("image") is None else part["image"] for part in _images(messages))
    return _without_sources(messages), tuple(images)


def _listed(place: str, column: str, value: object) -> list[ImageSource]:
    values = value if isinstance(value, list) else [value]
    return [source_of(f"{place}: {column}[{index}]", it) for index, it in enumerate(values)]


def _with_parts(place: str, messages: Sequence[Message], count: int) -> list[Message]:
    """Return messages with image parts in the places of `<image>` in their texts, or before the user's first text.

    Raises:
        ValueError: the texts have `<image>` another number of times.
    """
    texts = [text_of(message) for message in messages]
    found = sum(text.count(PLACEHOLDER) for text in texts)
    if found == count:
        return [
            {**message, "content": list(_split(text))} if PLACEHOLDER in text else message
            for message, text in zip(messages, texts, strict=True)
        ]
    if found:
        raise ValueError(
            f"{place} has {found} times {PLACEHOLDER} in its texts, but {count} images; write it once for each image, "
            "or leave it out"
        )
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), 0)
    parts: list[Mapping[str, Any]] = [{"type": "image", "image": None}] * count
    if texts[first]:
        parts = [*parts, {"type": "text", "text": texts[first]}]
    return [{**message, "content": parts} if it == first else message for it, message in enumerate(messages)]


def _split(text: str) -> Iterator[Mapping[str, Any]]:
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        if number:
            yield {"type": "image", "image": None}
        if piece:
            yield {"type": "text", "text": piece}


def _images(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    return [part for message in messages for part in _parts(message) if part["type"] == "image"]


def _parts(message: Message) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def has_images(messages: Sequence[Message]) -> bool:
    """Whether messages have image parts."""
    return bool(_images(messages))


def count_images(messages: Sequence[Message]) -> int:
    """Return the number of image parts of messages."""
    return len(_images(messages))


def _without_sources(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose image parts are as templates take them."""
    return [
        {**message, "content": [part if part["type"] == "text" else {"type": "image"} for part in parts]}
        if (parts := _parts(message))
        else message
        for message in messages
    ]


def text_of(message: Message) -> str:
    """Return the text of a message, without its images."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def texts_of(message: Message) -> list[str]:
    """Return the texts between the images of a message."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def with_text(message: Message, text: str) -> Message:
    """Return a message with its images, and this text instead of its first one."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": text}
    texts = [number for number, part in enumerate(content) if part["type"] == "text"]
    changed = [
        {"type": "text", "text": text} if number == texts[0] else part
        for number, part in enumerate(content)
        if part["type"] == "image" or number == texts[0]
    ]
    return {**message, "content": changed}


def forms_of_contents(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield messages with contents as templates may take them.

    With images: all contents as parts, as transformers' documentation has them, and then strings where there is no
    image. Without: strings, and then parts, which are all that some templates take.
    """
    if not has_images(messages):
        yield list(messages)
    yield [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
    if has_images(messages):
        yield list(messages)
