"""The writer process of one rank: takes bytes from the arena, hashes them, writes them through the store.

Does not import torch, directly or indirectly: that would cost every rank seconds and 150 MB. It does not know the other
ranks and commits nothing; it ends when its parent ends. `writer_process.py` is the parent's side.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from nxd_ckpt.asynchronous.handover import Slice
from nxd_ckpt.asynchronous.staged_file import ChunkHashes, staged_parts
from nxd_ckpt.stores.interface import SaveTransaction

_NICENESS = 10
_SIGN_OF_LIFE_SECONDS = 1.0
_PARENT_CHECK_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """A data file: its first bytes, then chunks of these sizes; their bytes follow as slices of the arena."""

    transaction: SaveTransaction
    file: str
    header: bytes
    chunk_sizes: Sequence[int]

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + sum(self.chunk_sizes)


@dataclass(frozen=True, slots=True)
class NothingMore:
    """The file's last slice has been sent."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Some more bytes are written."""


@dataclass(frozen=True, slots=True)
class SliceWritten:
    """The slice's part of the arena may be filled anew."""


@dataclass(frozen=True, slots=True)
class FileWritten:
    """The file is durable; the hashes of each chunk's blocks."""

    hashes: list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class WritingFailed:
    """The file could not be written; the type and text of the error."""

    reason: str


def main() -> None:
    """Serves the parent until it closes the connection. Arguments: arena, connection, parent's process id."""
    arena_fd, connection_fd, parent = map(int, sys.argv[1:4])
    os.nice(_NICENESS)
    # A signal for the whole group of processes is the parent's to answer; it may want to finish a save first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # Stopped, it could not look for its parent. Not SIGKILL: the signal comes when the thread that started this
        # process ends, which the parent may outlive.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(connection_fd)
    arena = memoryview(b"")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request = connection.recv()
            if not isinstance(request, FileToWrite):  # the rest of one that failed, until the parent hears of it
                continue
            if os.fstat(arena_fd).st_size != len(arena):
                arena = memoryview(mmap.mmap(arena_fd, 0, prot=mmap.PROT_READ))
            connection.send(_write(request, arena, connection))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


def _write(request: FileToWrite, arena: memoryview, connection: "Connection") -> FileWritten | WritingFailed:
    hashes = ChunkHashes(request.chunk_sizes)
    parts = staged_parts(request.header, arena, _received(connection), hashes)
    try:
        request.transaction.write_file(request.file, _with_signs_of_life(parts, connection), request.num_bytes)
    except (EOFError, ConnectionError):
        raise
    except Exception as error:  # any error must be reported to the parent
        return WritingFailed(f"{type(error).__name__}: {error}")
    return FileWritten(hashes.done)


def _received(connection: "Connection") -> Iterator[Slice]:
    while isinstance(following := connection.recv(), Slice):
        yield following
        connection.send(SliceWritten())


def _with_signs_of_life(parts: Iterator[bytes | memoryview], connection: "Connection") -> Iterator[bytes | memoryview]:
    last = time.monotonic()
    for part in parts:
        yield part
        if time.monotonic() - last > _SIGN_OF_LIFE_SECONDS:
            connection.send(Progress())
            last = time.monotonic()
