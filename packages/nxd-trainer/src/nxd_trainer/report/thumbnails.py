"""Pictures in a terminal: each character has two pixels, in the colors of its text and of its background."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.color import Color
from rich.style import Style
from rich.text import Text

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH, HEIGHT = 32, 24  # pixels at most: 32 columns and 12 lines
_UPPER_HALF = "▀"


def thumbnail(image: Image) -> Text:
    """Return a small picture, in lines of up to 32 characters.

    Args:
        image: a `PIL.Image`, RGB.
    """
    small = image.copy()
    small.thumbnail((WIDTH, HEIGHT))
    lines = [
        Text.assemble(
            *(
                (_UPPER_HALF, Style(color=_color(small, column, row), bgcolor=_color(small, column, row + 1)))
                for column in range(small.width)
            )
        )
        for row in range(0, small.height, 2)
    ]
    return Text("\n").join(lines)


def _color(image: Image, column: int, row: int) -> Color | None:
    if row >= image.height:
        return None
    red, green, blue = image.getpixel((column, row))
    return Color.from_rgb(red, green, blue)
