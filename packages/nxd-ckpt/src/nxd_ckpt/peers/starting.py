"""Starting the keeper of a host."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from nxd_ckpt.peers import keeper


class KeeperProcess:
    """A process that keeps files in the memory of this host; it ends when this one does, however that ends.

    What it keeps stays in its folder, for the next keeper of that folder. A context manager.

    Args:
        folder: in memory, such as one below `/dev/shm`; made if missing.
        secret: of the job; the same on all its hosts, and `NXD_PEERS_SECRET` of its ranks.
        host: the address of this host that others can reach.

    Attributes:
        address: `host:port`, for `peers_url`.
        pid: of the process.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, folder: "str | os.PathLike[str]", secret: str, host: str = "127.0.0.1") -> None:
        environment: Mapping[str, str] = {**os.environ, keeper.SECRET: secret}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", keeper.__file__, str(Path(folder)), host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the ranks
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().decode().strip()
        if not self.address:
            code = self._process.wait()
            raise OSError(f"the keeper of {folder} ended with code {code}; see what it printed")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.terminate()  # a fork of this process may have the other end of its input as well
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
