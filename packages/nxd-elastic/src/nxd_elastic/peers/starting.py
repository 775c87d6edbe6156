"""Starting the memory server of a host, seeing whether it is well, and starting it again when it has died."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from nxd_state.processes import hold_standard_streams

from nxd_elastic.peers import server

_SECONDS_TO_START = 30.0


class MemoryServerProcess:
    """A process that keeps files in the memory of this host; it ends when this one does, however that ends.

    What it keeps stays in its folder, for the next memory server of that folder. A context manager.

    Args:
        folder: in memory, such as one below `/dev/shm`; made if missing.
        secret: of the job; the same on all its hosts, and `NXD_PEERS_SECRET` of its ranks.
        host: the address of this host that others can reach.

    Attributes:
        address: `host:port`, with a host of IPv6 in brackets, for `peers_url`; the same after `restart`.
        pid: of the process.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, folder: "str | os.PathLike[str]", secret: str, host: str = "127.0.0.1") -> None:
        self._folder, self._host = Path(folder), host
        self._environment: Mapping[str, str] = {**os.environ, server.SECRET: secret}
        hold_standard_streams()
        self._port = _reserved_port(host)
        self._asked: float | None = None  # since when an answer is owed, on the monotonic clock
        try:
            self._process, self.address = self._start()
        except OSError:
            self._port.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def death(self) -> str | None:
        """How the process has ended, such as "was killed by SIGKILL"; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if -code in signal.valid_signals():
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}"

    def silence(self) -> float:
        """Seconds for which it has owed an answer, as one does that is stopped; each call asks, and none waits."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._asked is not None and _has_come(self._process.stdout.fileno(), 0.0):
            os.read(self._process.stdout.fileno(), 1)
            self._asked = None
        if self._asked is not None:
            return time.monotonic() - self._asked
        with suppress(OSError):  # it has died, as `death` says
            os.write(self._process.stdin.fileno(), b"?")
        self._asked = time.monotonic()
        return 0.0

    def kill(self) -> None:
        """End it at once, also where it is stopped; `restart` then starts another."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """After its death: serve the same folder at the same address, so that nobody needs to be told.

        Raises:
            OSError: it could not be started; it can be tried again.
        """
        self._close_pipes()
        self._asked = None
        self._process, self.address = self._start()

    def close(self) -> None:
        """End it."""
        self.kill()  # a fork of this process may have the other end of its input as well
        self._close_pipes()
        self._port.close()

    def _start(self) -> "tuple[subprocess.Popen[bytes], str]":
        port = self._port.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", server.__file__, str(self._folder), self._host, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is for the ranks
        )
        assert process.stdout is not None
        if not _has_come(process.stdout.fileno(), _SECONDS_TO_START):
            process.kill()
        address = process.stdout.readline().decode().strip()
        if not address:
            code = process.wait()
            raise OSError(f"the memory server of {self._folder} exited with code {code}; see its output")
        return process, address

    def _close_pipes(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _has_come(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read, or the end of it, within so many seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _reserved_port(host: str) -> socket.socket:
    """A free port that nobody else gets until this is closed; nothing listens, so a dead server is noticed."""
    reserved = socket.socket(server.family_of(host))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind((host, 0))
    except OSError:
        reserved.close()
        raise
    return reserved
