"""The prompts of `nxd generate`: texts to continue, and conversations, with the images in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nxd_cli.command import UserError, reports_user_errors

if TYPE_CHECKING:
    from nxd_trainer.image_prompts import ImagePrompts
    from nxd_trainer.opened_model import TextCodec


class Prompt(NamedTuple):
    """The tokens of a prompt."""

    tokens: list[int]
    images: Any = None  # what the model reads for its images; None if it has none


@dataclass
class Conversation:
    """The turns of a conversation so far."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[tuple[str, bytes]] = field(default_factory=list)  # place and content of all images, in order

    def ask(self, text: str, images: Sequence[tuple[str, bytes]] = ()) -> None:
        """Add a turn of the user, with images before its text."""
        parts: list[dict[str, str]] = [{"type": "image"} for _ in images]
        if text:
            parts.append({"type": "text", "text": text})
        self.messages.append({"role": "user", "content": parts if images else text})
        self.images += images


class PromptReader:
    """Turns texts and conversations into prompts.

    Args:
        codec: the model's tokenizer and chat template.
        open_images: returns what reads prompts with images; called for the first one. It raises ValueError if the model
            reads text alone.
    """

    def __init__(self, codec: TextCodec, open_images: Callable[[], ImagePrompts[Any]]) -> None:
        self._codec = codec
        self._open_images = open_images
        self._opened: ImagePrompts[Any] | None = None

    @property
    def images(self) -> ImagePrompts[Any]:
        """What reads prompts with images; raises UserError if the model reads text alone."""
        if self._opened is None:
            self._opened = reports_user_errors(self._open_images)
        return self._opened

    def text(self, text: str, images: Sequence[tuple[str, bytes]]) -> Prompt:
        """Return the prompt of a text to continue."""
        if images:
            return Prompt(*reports_user_errors(lambda: self.images.encode_text(text, images)))
        from nxd_data.tokenizer import encode_prompt  # noqa: PLC0415

        return Prompt(reports_user_errors(lambda: encode_prompt(self._codec.tokenizer, text)))

    def conversation(self, talk: Conversation) -> Prompt:
        """Return the prompt of a conversation to answer."""
        chat = self._codec.chat
        if chat is None:
            raise UserError(
                "--chat needs a chat template, which the model's tokenizer does not have; give the --tokenizer folder "
                "of a chat model, or leave out --chat"
            )
        if talk.images:
            return Prompt(*reports_user_errors(lambda: self.images.encode_prompt(talk.messages, talk.images)))
        return Prompt(reports_user_errors(lambda: chat.encode_prompt(talk.messages)))


def read_images(names: Sequence[str]) -> list[tuple[str, bytes]]:
    """Return names and contents of image files; raises UserError if one cannot be read."""
    from nxd_data.images import read_image_file  # noqa: PLC0415

    def read(name: str) -> bytes:
        file = Path(name).resolve()
        return read_image_file(name, file.parent, file.name)

    return [(name, reports_user_errors(lambda name=name: read(name))) for name in names]  # type: ignore[misc]
