"""The pool's handle of one worker process: start it, check whether it is alive, read what it printed, end it.

`nxd_testing.worker` runs inside it; `pool` assigns its jobs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection

from nxd_state.processes import hold_standard_streams

from nxd_testing.deadlines import deadline
from nxd_testing.failure import describe_exit
from nxd_testing.messages import READY, receive

_SECONDS_TO_START = 120.0
_SECONDS_TO_DIE = 2.0


class WorkerProcess:
    """A fresh interpreter in its own session, so that Ctrl-C reaches the parent alone.

    Not a `multiprocessing.Process`: that would import the parent's main module, pytest for example, again.
    """

    def __init__(self, store_port: int) -> None:
        hold_standard_streams()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._stacks.fileno())
        program = (
            f"import sys; sys.path[:] = {import_path()!r}; "
            f"from nxd_testing.worker import serve; serve({fds[0]}, {fds[1]}, {store_port})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", program],
            stdin=subprocess.PIPE,  # never written to: it closes when this process dies
            stdout=self._output,
            stderr=self._output,
            pass_fds=fds,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Waits for the first sign of life of a process just started.

        Raises:
            RuntimeError: it ended, or said nothing for too long.
        """
        if self._is_ready:
            return
        try:
            self._is_ready = self.connection.poll(deadline(_SECONDS_TO_START)) and receive(self.connection) == READY
        except EOFError:
            raise RuntimeError(
                f"a worker process {self.end()} while it started; it printed:\n{self.take_output()}"
            ) from None
        if not self._is_ready:
            self.kill()
            raise RuntimeError(f"a worker process did not start in {deadline(_SECONDS_TO_START):.0f} s")

    def take_output(self) -> str:
        """Returns what was printed since the last call, stdout and stderr as they were interleaved."""
        output = _read(self._output.fileno())
        # The file offset is shared with the worker, which therefore continues writing at the start.
        os.ftruncate(self._output.fileno(), 0)
        os.lseek(self._output.fileno(), 0, os.SEEK_SET)
        # gloo of torch 2.9 reports each connection on stdout.
        return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))

    def stacks(self) -> str:
        """Returns the Python stacks that the process wrote when a signal ended it, or an empty text."""
        # One paragraph per thread; the watchdog's and the list of extension modules are of no use.
        paragraphs = _read(self._stacks.fileno()).split("\n\n")
        return "\n\n".join(
            text for text in paragraphs if "in watch\n" not in text and not text.startswith("Extension modules")
        )

    def abort(self) -> None:
        """Makes the process write the stacks of all its threads and die; `end` waits for that."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGABRT)  # on which faulthandler writes them

    def end(self) -> str:
        """Waits until an ending process is gone, kills its remaining children, and returns how it ended."""
        try:
            returncode = self._process.wait(deadline(_SECONDS_TO_DIE))
        except subprocess.TimeoutExpired:
            returncode = -signal.SIGKILL
        self.kill()
        return describe_exit(returncode)

    def close(self) -> None:
        """Asks an idle process to leave; `end` waits for it."""
        self.connection.close()

    def kill(self) -> None:
        """Kills the process and its children, now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.connection.close()

    def forget(self) -> None:
        """Close the files with the output of an ended process."""
        self._output.close()
        self._stacks.close()


def import_path() -> list[str]:
    """`sys.path` as another process in another directory must have it."""
    return [os.path.abspath(entry) for entry in sys.path]


def _read(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
