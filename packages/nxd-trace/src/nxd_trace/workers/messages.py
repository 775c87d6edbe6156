"""Messages between a model's process and its workers, over a socket pair per worker.

Every message begins with a header of fixed length. A call needs no more than that: which program to run. Everything
else carries a pickled object. That is safe because a socket pair has no address: only this process and the workers that
it started hold an end, so no other user can put a pickle there, and nothing here comes from a file.
"""

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_HEADER = struct.Struct("=cIQ")  # kind; program of a call; bytes that follow

CALL, DONE, OBJECT = b"C", b"D", b"O"


@dataclass(frozen=True)
class Build:
    """Build what a pickled `BuildCall` says, and write this rank's weights and state below `folder`."""

    call: bytes
    folder: str


@dataclass(frozen=True)
class Fill:
    """Read this rank's weights from a pickled source, for a trace without them that is below `folder`."""

    source: bytes
    folder: str


@dataclass(frozen=True)
class Export:
    """Record the graph of every program; the answer describes them."""

    compiler: str
    arguments: tuple[str, ...]
    inline_weights: bool


@dataclass(frozen=True)
class Compile:
    """Compile one program into a folder."""

    program: int
    folder: str
    workdir: str


@dataclass(frozen=True)
class Serve:
    """Load the model of a folder, in place of what was built, and take calls."""

    folder: str
    preprocessor: bytes  # pickled: what makes the state preprocessor, or None


@dataclass(frozen=True)
class ReplaceWeights:
    """Read new weights from a pickled source, and write them below `folder` as well."""

    source: bytes
    folder: str


@dataclass(frozen=True)
class ResetState:
    """Set the state back to what it was before the first call."""


@dataclass(frozen=True)
class ReadState:
    """Answer with a copy of one state tensor of this rank."""

    name: str


@dataclass(frozen=True)
class WriteState:
    """Put other values into one state tensor of this rank."""

    name: str
    value: Tensor


@dataclass(frozen=True)
class Answer:
    """A worker's answer to a request: a value, or an error as text with its traceback.

    Attributes:
        storage_error: set where the disk is full or read-only, which is the user's to mend and needs no traceback.
    """

    value: Any = None
    error: str = ""
    traceback: str = ""
    lacks_main_guard: bool = False
    storage_error: OSError | None = None


def send_header(connection: socket.socket, kind: bytes, program: int = 0) -> None:
    """Send a message that is nothing but its header."""
    connection.sendall(_HEADER.pack(kind, program, 0))


def send_object(connection: socket.socket, value: Any) -> None:
    """Send any object that can be pickled."""
    body = pickle.dumps(value)
    connection.sendall(_HEADER.pack(OBJECT, 0, len(body)) + body)


def receive(connection: socket.socket) -> tuple[bytes, int, Any]:
    """The next message: kind, program, object.

    Raises:
        EOFError: the other end is gone.
    """
    kind, program, length = _HEADER.unpack(_read(connection, _HEADER.size))
    return kind, program, pickle.loads(_read(connection, length)) if kind == OBJECT else None


def _read(connection: socket.socket, length: int) -> bytes:
    """Exactly this many bytes."""
    data = connection.recv(length)
    if len(data) == length:
        return data
    parts = [data]
    missing = length - len(data)
    while missing:
        if not parts[-1]:
            raise EOFError("the peer has closed the connection")
        parts.append(connection.recv(min(missing, 1 << 20)))
        missing -= len(parts[-1])
    return b"".join(parts)
