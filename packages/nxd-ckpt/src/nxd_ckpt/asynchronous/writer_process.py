"""The parent's side of a writer process: starts it, has it write, notices when it is gone, ends it."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection

from nxd_ckpt.asynchronous.handover import Slice
from nxd_ckpt.asynchronous.writer import FileToWrite, FileWritten, NothingMore, Progress, SliceWritten, WritingFailed
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import hold_standard_streams

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LOOK_SECONDS = 0.5
_END_SECONDS = 5.0

# A fresh interpreter: no fork of a process with threads and devices, and the user's main module is not run again. The
# package gets in without its __init__, which would import torch.
_PROGRAM = """
import json, sys, types
sys.path[:] = json.loads(sys.argv.pop())
package = types.ModuleType("nxd_ckpt")
package.__path__ = json.loads(sys.argv.pop())
sys.modules["nxd_ckpt"] = package
from nxd_ckpt.asynchronous.writer import main
main()
"""


class WriterProcess:
    """A process that writes one file at a time from the arena. It ends when this process does, however that ends.

    Args:
        arena_fd: the arena's memory.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, arena_fd: int) -> None:
        # Without a name and inherited by this child alone: what is pickled over it comes from this process only.
        hold_standard_streams()
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = [str(arena_fd), str(theirs.fileno()), str(os.getpid())]
            paths = [json.dumps([_PACKAGE_FOLDER]), json.dumps(sys.path)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, *numbers, *paths],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(arena_fd, theirs.fileno()),
            )
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it can write."""
        return self._process.poll() is None

    def write(self, request: FileToWrite, slices: Iterable[Slice], timeout: float) -> list[tuple[str, ...]]:
        """Has one file written, and returns the hashes of each chunk's blocks when it is durable.

        Args:
            request: the file.
            slices: its payload, asked for one by one as the one before is written.
            timeout: seconds without a sign of life after which the process is ended.

        Raises:
            CheckpointError: it could not be written, or the process is gone. It is not to be used again then.
        """
        try:
            self._connection.send(request)
            for following in slices:
                self._connection.send(following)
                self._answer(timeout)
            self._connection.send(NothingMore())
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
        """Ends the process, gently if it can hear."""
        self._connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()

    def _answer(self, timeout: float) -> "SliceWritten | FileWritten":
        deadline = time.monotonic() + timeout
        while True:
            if self._connection.poll(_LOOK_SECONDS):
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
                raise CheckpointError(f"{self._name()} gave no sign of life for {timeout:g} seconds and was ended")

    def _name(self) -> str:
        return f"its writer process {self.pid}"

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its connection and was ended"
        return f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
