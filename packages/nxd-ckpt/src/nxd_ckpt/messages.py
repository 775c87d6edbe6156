"""The messages between ranks: compressed JSON. Nothing is unpickled, since other programs may write to the store.

A message is None, a bool, a number, a string, or lists and dicts of them; tuples arrive as lists. Callers that expect a
specific structure check it: `parsed` converts each rank's message, or raises an error that names the rank.
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
    """Encode a value as bytes.

    Raises:
        ValueError: JSON cannot represent it; names the part.
    """
    check_json(value, "a message to other ranks", nesting=-_ENVELOPES)
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode("ascii"), 1)


def decode_message(data: bytes) -> Any:
    """Return the value of a message.

    Raises:
        ValueError: the bytes are not a message, or are larger than the limit.
    """
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, MAX_MESSAGE_BYTES)
        if not unpacker.eof:
            raise ValueError("it is cut off or too large")
        return json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"{len(data)} bytes are not a message from a rank: {error}") from error


def join(messages: Iterable[bytes]) -> bytes:
    """Join messages into one: their sizes as a JSON list, a line break, and the messages."""
    messages = list(messages)
    return json.dumps([len(message) for message in messages]).encode() + b"\n" + b"".join(messages)


def split(joined: bytes) -> list[bytes]:
    """Split joined messages.

    Raises:
        ValueError: the bytes are not joined messages.
    """
    header, _, rest = joined.partition(b"\n")
    try:
        sizes = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the sizes of joined messages are not valid JSON: {error}") from error
    if not (isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)):
        raise ValueError("the sizes of joined messages are not a list of sizes")
    if sum(sizes) != len(rest):
        raise ValueError(f"joined messages have {len(rest)} bytes, expected {sum(sizes)}")
    messages, begin = [], 0
    for size in sizes:
        messages.append(rest[begin : begin + size])
        begin += size
    return messages


def parsed(messages: Sequence[Any], parse: Callable[[Any], T], doing: str) -> list[T]:
    """Parse each rank's message, in rank order.

    Args:
        messages: the received messages.
        parse: function that parses one; raises ValueError, TypeError, KeyError or AttributeError if it is malformed.
        doing: the operation, for the error.

    Raises:
        RanksLostError: a rank sent something else.
    """
    found = []
    for rank, message in enumerate(messages):
        try:
            found.append(parse(message))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RanksLostError(
                f"{doing} failed: rank {rank} sent an unexpected message ({type(error).__name__}: {error}); "
                "make the same calls on all ranks, with the same version of nxd-ckpt"
            ) from error
    return found


def expect(condition: bool, found: str) -> None:
    """Raise ValueError with the text `found`, unless the condition holds."""
    if not condition:
        raise ValueError(f"it has {found}")


def all_are(kind: type, values: Iterable[object]) -> bool:
    """Whether all values are of a type; a bool does not count as a number."""
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
