"""One worker process as its parent sees it: started, talked to through a socket, ended."""

import contextlib
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

from nxd_trace.workers.launching import launch

_SECONDS_TO_LEAVE = 2.0


class WorkerProcess:
    """A process in its own session, so that Ctrl-C reaches the parent alone.

    Args:
        rank: of the worker.
        memory: descriptor of the memory that it shares with this process.
        environment: its environment variables.

    Attributes:
        connection: our end of the socket pair; it reads as closed once the process is gone.
    """

    def __init__(self, rank: int, memory: int, environment: dict[str, str]) -> None:
        self.rank = rank
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.connection, theirs = socket.socketpair()
        stdin, self._stdin = os.pipe()  # never written to: it closes when this process dies
        descriptors = {
            "stdin": stdin,
            "connection": theirs.fileno(),
            "memory": memory,
            "stacks": self._stacks.fileno(),
        }
        try:
            self._process = launch({"main": main_script()}, descriptors, environment)
        except BaseException:
            os.close(self._stdin)
            raise
        finally:
            os.close(stdin)
            theirs.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has halted it, and it waits for SIGCONT; never where that is unknown."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended, or this is no Linux
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def describe_stop(self) -> str:
        """That the process is stopped, and why it cannot be waited for."""
        return (
            f"the worker, process {self.pid}, was stopped by a signal such as SIGSTOP (state T) and did not answer; it "
            "was ended. Find out what stops processes here, and call restart() to start new ones"
        )

    def describe_end(self) -> str:
        """How a process whose connection is closed ended, with its Python stacks if it wrote them."""
        code = self._process.wait(_SECONDS_TO_LEAVE)
        if code is None:
            how = "closed its connection without ending"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        stacks = os.pread(self._stacks.fileno(), os.fstat(self._stacks.fileno()).st_size, 0).decode(errors="replace")
        return f"{how}\n{stacks}" if stacks else how

    def close(self) -> None:
        """Ask an idle process to leave; `end` waits for it."""
        self.connection.close()

    def end(self, patience: float = _SECONDS_TO_LEAVE) -> None:
        """Wait so many seconds until it has left, then kill it and its children."""
        self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_SECONDS_TO_LEAVE)
        os.close(self._stdin)
        self.connection.close()
        self._stacks.close()


def main_script() -> dict[str, str]:
    """Where the main module came from, for workers that need a function defined in it."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name:
        return {"name": name}
    path = getattr(main, "__file__", None)
    return {"path": os.path.abspath(path)} if path else {}
