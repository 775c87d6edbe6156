"""The process that writes one rank's files: its parent starts it and sends slices, and it hashes and writes them.

Neither side of this file imports torch, directly or indirectly: that would cost the process seconds and 150 MB. The
process does not know the other ranks and commits nothing; it ends when its parent ends.
"""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from nxd_ckpt.asynchronous.slices import ChunkHashes, Slice, staged_parts
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import hold_standard_streams
from nxd_ckpt.stores.interface import SaveTransaction

_NICENESS = 10
_PROGRESS_SECONDS = 1.0  # between messages that the process is at work
_PARENT_CHECK_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_POLL_SECONDS = 0.5
_END_SECONDS = 5.0
_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# A new interpreter: a process with threads and devices is not forked, and the user's main module does not run again.
# The package is imported without its __init__, which would import torch.
_PROGRAM = """
import json, sys, types
sys.path[:] = json.loads(sys.argv.pop())
package = types.ModuleType("nxd_ckpt")
package.__path__ = json.loads(sys.argv.pop())
sys.modules["nxd_ckpt"] = package
from nxd_ckpt.asynchronous.writer_process import main
main()
"""


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """A data file: its first bytes, and the sizes of its chunks, whose bytes follow as slices of the shared memory."""

    transaction: SaveTransaction
    file: str
    header: bytes
    chunk_sizes: Sequence[int]

    @property
    def num_bytes(self) -> int:
        """The size of the whole file."""
        return len(self.header) + sum(self.chunk_sizes)


@dataclass(frozen=True, slots=True)
class EndOfFile:
    """The file's last slice was sent."""


@dataclass(frozen=True, slots=True)
class Progress:
    """More bytes are written."""


@dataclass(frozen=True, slots=True)
class SliceWritten:
    """The memory of the slice may be filled again."""


@dataclass(frozen=True, slots=True)
class FileWritten:
    """The file is durable; with the block hashes of each chunk."""

    hashes: list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class WritingFailed:
    """The file could not be written; with the type and text of the error."""

    reason: str


class WriterProcess:
    """A process that writes one file at a time from the shared memory. It ends when this process ends, however it does.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, memory_fd: int) -> None:
        # The sockets have no name and only this child inherits one, so pickles over it come from this process alone.
        hold_standard_streams()
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = [str(memory_fd), str(theirs.fileno()), str(os.getpid())]
            paths = [json.dumps([_PACKAGE_FOLDER]), json.dumps(sys.path)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, *numbers, *paths],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(memory_fd, theirs.fileno()),
            )
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the process can write."""
        return self._process.poll() is None

    def write(self, request: FileToWrite, slices: Iterable[Slice], timeout: float) -> list[tuple[str, ...]]:
        """Write one file, and return the block hashes of each chunk when it is durable.

        Args:
            request: the file.
            slices: the payload; the next slice is requested when the previous one is written.
            timeout: seconds without a message after which the process is killed.

        Raises:
            CheckpointError: the file could not be written, or the process is gone; do not use it again.
        """
        try:
            self._connection.send(request)
            for following in slices:
                self._connection.send(following)
                self._answer(timeout)
            self._connection.send(EndOfFile())
            answer = self._answer(timeout)
        except (EOFError, ConnectionError):
            raise CheckpointError(f"{self._name()} {self._how_it_ended()}") from None
        except BaseException:  # it may be waiting for the rest of a file that will never come
            self.kill()
            raise
        if not isinstance(answer, FileWritten):
            raise CheckpointError(f"{self._name()} answered {answer} out of turn")
        return answer.hashes

    def close(self) -> None:
        """End the process: close the connection, and kill it if that does not help."""
        self._connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self, timeout: float) -> SliceWritten | FileWritten:
        deadline = time.monotonic() + timeout
        while True:
            if self._connection.poll(_POLL_SECONDS):
                answer = self._connection.recv()
                if isinstance(answer, WritingFailed):
                    raise CheckpointError(answer.reason)
                if isinstance(answer, SliceWritten | FileWritten):
                    return answer
                assert isinstance(answer, Progress)
                deadline = time.monotonic() + timeout
            elif not self.is_alive():  # the connection may be kept open by a child forked meanwhile
                raise EOFError
            elif time.monotonic() > deadline:
                self.kill()
                raise CheckpointError(f"{self._name()} sent no message for {timeout:g} seconds and was killed")

    def _name(self) -> str:
        return f"its writer process {self.pid}"

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its connection and was killed"
        return f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"


def main() -> None:
    """Serve the parent until it closes the connection. Arguments: shared memory, connection, parent's process id."""
    memory_fd, connection_fd, parent = map(int, sys.argv[1:4])
    os.nice(_NICENESS)
    # The parent handles signals to the whole process group; it may finish a save first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # Wakes this process if it is stopped when its parent ends. Not SIGKILL: the signal comes when the thread that
        # started this process ends, which the parent may outlive.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(connection_fd)
    memory = memoryview(b"")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request = connection.recv()
            if not isinstance(request, FileToWrite):  # the rest of a file that failed, until the parent knows
                continue
            if os.fstat(memory_fd).st_size != len(memory):
                memory = memoryview(mmap.mmap(memory_fd, 0, prot=mmap.PROT_READ))
            connection.send(_write(request, memory, connection))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


def _write(request: FileToWrite, memory: memoryview, connection: Connection) -> FileWritten | WritingFailed:
    hashes = ChunkHashes(request.chunk_sizes)
    parts = staged_parts(request.header, memory, _received(connection), hashes)
    try:
        request.transaction.write_file(request.file, _with_progress(parts, connection), request.num_bytes)
    except (EOFError, ConnectionError):
        raise
    except Exception as error:  # any error must be reported to the parent
        return WritingFailed(f"{type(error).__name__}: {error}")
    return FileWritten(hashes.done)


def _received(connection: Connection) -> Iterator[Slice]:
    while isinstance(following := connection.recv(), Slice):
        yield following
        connection.send(SliceWritten())


def _with_progress(parts: Iterator[bytes | memoryview], connection: Connection) -> Iterator[bytes | memoryview]:
    last = time.monotonic()
    for part in parts:
        yield part
        if time.monotonic() - last > _PROGRESS_SECONDS:
            connection.send(Progress())
            last = time.monotonic()
