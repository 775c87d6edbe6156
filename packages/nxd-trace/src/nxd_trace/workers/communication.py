"""Communication between a model's process and its workers: messages over a socket pair, tensors in shared memory.

Every message starts with a header of fixed length. A call is only a header, with the index of its program; other
messages carry a pickled object. That is safe because a socket pair has no address: only this process and its workers
hold its ends, so no other user can send a pickle, and none comes from a file. The shared memory has no name either,
only a descriptor that the workers inherit, so nothing remains once all of them have ended.
"""

import ctypes
import mmap
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nxd_state.processes import hold_standard_streams
from torch import Tensor

from nxd_trace.programs import Signature, TensorSpec

_HEADER = struct.Struct("=cIQ")  # kind; program of a call; number of bytes that follow
CALL, DONE, OBJECT = b"C", b"D", b"O"

_ALIGNMENT = 64  # bytes; compiled programs expect this of their inputs
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>


@dataclass(frozen=True)
class Build:
    """Build the models of a pickled `BuildCall`, and write this rank's weights and state below `folder`."""

    call: bytes
    folder: str


@dataclass(frozen=True)
class Fill:
    """Read this rank's weights from a pickled source, for the cached trace in `folder`."""

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
    """Load a model in place of the one that was traced, and accept calls."""

    folder: str
    preprocessor: bytes  # pickled: a function that returns the state preprocessor, or None


@dataclass(frozen=True)
class ReplaceWeights:
    """Read new weights from a pickled source, and write them below `folder`."""

    source: bytes
    folder: str


@dataclass(frozen=True)
class ResetState:
    """Reset the state to its initial values."""


@dataclass(frozen=True)
class ReadState:
    """Return a copy of one state tensor of this rank."""

    name: str


@dataclass(frozen=True)
class WriteState:
    """Overwrite one state tensor of this rank."""

    name: str
    value: Tensor


@dataclass(frozen=True)
class Answer:
    """A worker's answer: a value, or an error as text with its traceback.

    Attributes:
        storage_error: set if a disk is full or read-only: an error for the user, without a traceback.
    """

    value: Any = None
    error: str = ""
    traceback: str = ""
    lacks_main_guard: bool = False
    storage_error: OSError | None = None


def send_header(connection: socket.socket, kind: bytes, program: int = 0) -> None:
    """Send a message without an object."""
    connection.sendall(_HEADER.pack(kind, program, 0))


def send_object(connection: socket.socket, value: Any) -> None:
    """Send an object by pickle."""
    body = pickle.dumps(value)
    connection.sendall(_HEADER.pack(OBJECT, 0, len(body)) + body)


def receive(connection: socket.socket) -> tuple[bytes, int, Any]:
    """Receive the next message: its kind, program and object."""
    kind, program, length = _HEADER.unpack(_receive_bytes(connection, _HEADER.size))
    return kind, program, pickle.loads(_receive_bytes(connection, length)) if kind == OBJECT else None


def _receive_bytes(connection: socket.socket, length: int) -> bytes:
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


def new_shared_file() -> int:
    """Create empty shared memory and return its file descriptor, which the caller closes."""
    hold_standard_streams()
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nxd_trace")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next call; does nothing with another C library.

    Otherwise glibc returns each large tensor to the system, and the next call waits for new pages to be zeroed: for the
    keys and values that a decode step gathers, five times as long as the copy itself.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


class SharedTensors:
    """The inputs and outputs of every program, as tensors in shared memory.

    Programs run one at a time, so they use the same bytes.

    Attributes:
        inputs: input tensors of each program.
        outputs: output tensors of each program.
    """

    def __init__(self, file: int, signatures: Sequence[Signature]) -> None:
        first_output = max((_end_of(signature.inputs, 0) for signature in signatures), default=0)
        end = max((_end_of(signature.outputs, first_output) for signature in signatures), default=0)
        length = max(end, _ALIGNMENT)
        if os.fstat(file).st_size < length:
            os.ftruncate(file, length)
        memory = mmap.mmap(file, length)  # lives as long as any tensor in it
        self.inputs = [_views(memory, signature.inputs, 0) for signature in signatures]
        self.outputs = [_views(memory, signature.outputs, first_output) for signature in signatures]


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _end_of(specs: Sequence[TensorSpec], start: int) -> int:
    return start + sum(_aligned(spec.nbytes) for spec in specs)


def _views(memory: mmap.mmap, specs: Sequence[TensorSpec], start: int) -> list[Tensor]:
    views = []
    for spec in specs:
        if spec.numel == 0:
            views.append(torch.empty(spec.shape, dtype=spec.torch_dtype))
        else:
            flat = torch.frombuffer(memory, dtype=spec.torch_dtype, count=spec.numel, offset=start)
            views.append(flat.view(spec.shape))
        start += _aligned(spec.nbytes)
    return views
