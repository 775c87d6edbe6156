"""What ranks send one another: JSON, compressed. Others on a machine may write to a store, so nothing is unpickled.

A message is None, a bool, a number, text, or lists and dicts of them; tuples arrive as lists. Whoever expects more than
that checks it: `parsed` turns what a rank sent into what it should be, or into an error that names the rank.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from nxd_ckpt.errors import RanksLostError
from nxd_ckpt.objects import check_json

MAX_MESSAGE_BYTES = 2**31
_ENVELOPES = 8  # lists around what a caller gave, which may itself be nested as deep as `check_json` allows

T = TypeVar("T")


def encode_message(value: object) -> bytes:
    """A value as bytes.

    Raises:
        ValueError: JSON cannot hold it; says which part.
    """
    check_json(value, "a message to other ranks", nesting=-_ENVELOPES)
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode("ascii"), 1)


def decode_message(data: bytes) -> Any:
    """The value of a message.

    Raises:
        ValueError: it is none, or larger than one can be.
    """
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, MAX_MESSAGE_BYTES)
        if not unpacker.eof:
            raise ValueError("it is cut off or too large")
        return json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"{len(data)} bytes are no message of a rank: {error}") from error


def join(messages: Iterable[bytes]) -> bytes:
    """Several messages as one: their sizes as a JSON list, a line break, and the messages."""
    messages = list(messages)
    return json.dumps([len(message) for message in messages]).encode() + b"\n" + b"".join(messages)


def split(joined: bytes) -> list[bytes]:
    """The messages that were joined.

    Raises:
        ValueError: these are none.
    """
    header, _, rest = joined.partition(b"\n")
    try:
        sizes = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the sizes of joined messages are no JSON: {error}") from error
    if not (isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)):
        raise ValueError("the sizes of joined messages are no numbers")
    if sum(sizes) != len(rest):
        raise ValueError(f"joined messages have {len(rest)} bytes, expected {sum(sizes)}")
    messages, begin = [], 0
    for size in sizes:
        messages.append(rest[begin : begin + size])
        begin += size
    return messages


def parsed(messages: Sequence[Any], parse: Callable[[Any], T], doing: str) -> list[T]:
    """What each rank's message says, in rank order.

    Args:
        messages: as they were received.
        parse: checks one; raises ValueError, TypeError, KeyError or AttributeError where it is not as it should be.
        doing: for the error.

    Raises:
        RanksLostError: a rank sent something else.
    """
    found = []
    for rank, message in enumerate(messages):
        try:
            found.append(parse(message))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RanksLostError(
                f"{doing} failed: rank {rank} sent what is no message of this kind ({type(error).__name__}: {error}); "
                "call the same on all ranks, with the same version of nxd-ckpt"
            ) from error
    return found


def expect(condition: bool, found: str) -> None:
    """Raises ValueError with what was found, unless the condition holds."""
    if not condition:
        raise ValueError(f"it has {found}")


def all_are(kind: type, values: Iterable[object]) -> bool:
    """Whether all values are of a type; a bool is no number."""
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
