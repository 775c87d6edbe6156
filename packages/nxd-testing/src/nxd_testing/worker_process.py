"""The pool's handle of one worker process: start it, read its output, end it. `nxd_testing.worker` runs inside it."""

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

from nxd_testing.failure import deadline, describe_exit
from nxd_testing.messages import READY, receive

_SECONDS_TO_START = 120.0
_SECONDS_TO_DIE = 2.0


class WorkerProcess:
    """A fresh interpreter in its own session, so that Ctrl-C reaches only the parent.

    Not a `multiprocessing.Process`, which would import the parent's main module again.
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
            stdin=subprocess.PIPE,  # never written to; it closes when this process dies
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
        """Wait until the process has started.

        Raises:
            RuntimeError: the process ended, or did not start in time.
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
        """Return the output since the last call, with stdout and stderr interleaved."""
        output = _read(self._output.fileno())
        # The worker shares the file offset, so it continues writing at the start.
        os.ftruncate(self._output.fileno(), 0)
        os.lseek(self._output.fileno(), 0, os.SEEK_SET)
        # gloo of torch 2.9 reports each connection on stdout.
        return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))

    def stacks(self) -> str:
        """Return the Python stacks that the process wrote when a signal ended it, or an empty string."""
        # One paragraph per thread, without the watchdog and the list of extension modules.
        paragraphs = _read(self._stacks.fileno()).split("\n\n")
        return "\n\n".join(
            text for text in paragraphs if "in watch\n" not in text and not text.startswith("Extension modules")
        )

    def abort(self) -> None:
        """Make the process write the stacks of all its threads and die; `end` waits for that."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGABRT)  # faulthandler writes the stacks

    def end(self) -> str:
        """Wait for an ending process, kill its remaining children, and return how it ended."""
        try:
            returncode = self._process.wait(deadline(_SECONDS_TO_DIE))
        except subprocess.TimeoutExpired:
            returncode = -signal.SIGKILL
        self.kill()
        return describe_exit(returncode)

    def close(self) -> None:
        """Ask an idle process to exit; `end` waits for it."""
        self.connection.close()

    def kill(self) -> None:
        """Kill the process and its children."""
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
    """Return `sys.path` with absolute paths, for a process in another directory."""
    return [os.path.abspath(entry) for entry in sys.path]


def _read(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
