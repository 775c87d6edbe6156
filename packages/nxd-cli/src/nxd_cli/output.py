"""The output of commands: standard streams that are open and hold no control characters, and numbers for people."""

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


def show_duration(seconds: float) -> str:
    """Format a duration, as in "0:07", "12:34" or "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_seconds(seconds: float) -> str:
    """Format seconds with three digits, as in "0.0417 s", or as "21.8 s" from ten on."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.3g} s"


def show_memory(num_bytes: float) -> str:
    """Format bytes, as in "1.4 GiB", "512 MiB" below 1 GiB, or "1.4 MiB" below 10 MiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    mib = num_bytes / 2**20
    return f"{mib:.0f} MiB" if mib >= 10 or mib == 0 else f"{mib:.1f} MiB"


def show_count(count: float) -> str:
    """Format a count, as in "950", "12.3k", "4.10M" or "1.20B"."""
    for limit, divisor, form in ((1e3, 1, "{:.0f}"), (1e6, 1e3, "{:.1f}k"), (1e9, 1e6, "{:.2f}M")):
        if count < limit:
            return form.format(count / divisor)
    return f"{count / 1e9:.2f}B"
