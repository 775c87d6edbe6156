"""The streams of a command: there even where the caller has closed them, and without what would steer a terminal.

File names, column names, keys and templates of strangers come into messages; their control characters could move the
cursor, recolour what was said before, or set the title of the terminal's window.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

_LINE_UP = "\x1b[A"  # tqdm moves so between its bars, in writes of their own


def printable(text: str) -> str:
    """A text for a terminal: what is no printable character, line end or tab, is escaped as Python does."""
    if text.isprintable():
        return text
    return "".join(it if it.isprintable() or it in "\n\t" else repr(it)[1:-1] for it in text)


@contextmanager
def usable_streams() -> Iterator[None]:
    """Open what the caller has closed of the standard streams, and have all that goes to standard error be printable.

    A closed one reads and writes nothing. Without it, the next file or socket would get its number. As
    `hold_standard_streams` of nxd-state, whose import takes as long as that of torch.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends
    with redirect_stderr(_PrintableStream(sys.stderr)):
        yield


class _PrintableStream:
    """Passes on to a stream what is printable of a text; tqdm's moves pass as they are."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, which may begin with a return to the beginning of the line."""
        body = text.lstrip("\r")
        is_a_move = not body.replace(_LINE_UP, "").strip("\r\n ")
        self._stream.write(text if is_a_move else text[: len(text) - len(body)] + printable(body))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
