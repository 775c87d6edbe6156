"""Messages between ranks through the job's key-value store: data, which is checked before it is used or shown.

Over several hosts the store is torch's own, which answers anyone who reaches its port.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_LONGEST_SHOWN = 200  # characters


class PeerError(RuntimeError):
    """This rank cannot continue because another one failed, ended or did not answer in time."""


def printable(text: str) -> str:
    """Escape a text's control characters, except line breaks and tabs."""
    return "".join(it if it.isprintable() or it in "\n\t" else repr(it)[1:-1] for it in text)


def read_message(key: str, data: bytes, parse: Callable[[Any], T]) -> T:
    """Parse a value that a rank has written into the store as JSON.

    Args:
        key: the key of the value.
        data: the value found.
        parse: builds the message from plain values; raises ValueError, TypeError, KeyError, IndexError or
            AttributeError if they are invalid.
    """
    try:
        return parse(json.loads(data))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise PeerError(
            f"the job's store has {data[:_LONGEST_SHOWN]!r} under {key!r}, which no rank of this version has written "
            f"({type(error).__name__}: {printable(str(error))[:_LONGEST_SHOWN]}); run the same versions on all ranks, "
            "in a network that only trusted users reach"
        ) from error
