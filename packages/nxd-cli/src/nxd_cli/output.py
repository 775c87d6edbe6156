"""The standard streams of a command: open even if the caller closed them, and free of terminal control characters.

Messages contain file names, column names, keys and templates of strangers; their control characters could move the
cursor, recolor earlier output, or set the title of the terminal window.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

_LINE_UP = "\x1b[A"  # tqdm moves between its bars with it, in separate writes


def printable(text: str) -> str:
    """A text for a terminal: all but printable characters, line ends and tabs is escaped as Python does."""
    if text.isprintable():
        return text
    return "".join(it if it.isprintable() or it in "\n\t" else repr(it)[1:-1] for it in text)


@contextmanager
def usable_streams() -> Iterator[None]:
    """Open the standard streams that the caller has closed, and make everything written to standard error printable.

    A stream opened here reads and writes nothing. Otherwise the next file or socket would get its descriptor. Same as
    `hold_standard_streams` of nxd-state, which imports torch and so takes seconds.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends
    with redirect_stderr(_PrintableStream(sys.stderr)):
        yield


class _PrintableStream:
    """Writes text to a stream with control characters escaped; tqdm's cursor moves pass unchanged."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, which may begin with carriage returns."""
        body = text.lstrip("\r")
        is_a_move = not body.replace(_LINE_UP, "").strip("\r\n ")
        self._stream.write(text if is_a_move else text[: len(text) - len(body)] + printable(body))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
