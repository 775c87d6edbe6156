"""Starting worker processes: forks of a server that is started with the first of them.

The server serves all models of this process, and ends with it. It runs `fork_server`.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from nxd_state.processes import hold_standard_streams

from nxd_trace.workers.fork_server import DESCRIPTORS, EXIT_CODE, LENGTH, PROCESS_ID

# Libraries read these variables when they are loaded: with others, there must be another server.
_READ_WHEN_LOADED = (
    "CUDA",
    "GOMP",
    "KMP",
    "LD_",
    "MKL",
    "NXD",
    "OMP",
    "OPENBLAS",
    "PJRT",
    "PYTHON",
    "PYTORCH",
    "TORCH",
)

# In the server, which only loads libraries: nothing that would not survive a fork.
_WITHOUT_SIDE_EFFECTS = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # checks for CUDA without making a context
    "TORCH_WARM_POOL": "0",  # no compile workers
}


class LaunchedProcess:
    """A process that the server has forked.

    Args:
        pid: its process id.
        status: descriptor that the server writes the exit code to.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._status = status
        self._exit_code: int | None = None

    def wait(self, timeout: float) -> int | None:
        """Its exit code, as `subprocess.Popen.returncode`; None if it has not ended after this many seconds."""
        if self._exit_code is None and _is_readable(self._status, timeout):
            code = os.read(self._status, EXIT_CODE.size)
            os.close(self._status)
            self._exit_code = EXIT_CODE.unpack(code)[0] if code else 1  # without a server the outcome is unknown
        return self._exit_code


class ForkServer:
    """The server, as seen from the process whose workers it forks."""

    def __init__(self) -> None:
        self._variables = _variables_read_when_loaded()
        self._owner = os.getpid()
        hold_standard_streams()
        self._connection, theirs = socket.socketpair()
        program = (
            f"import sys; sys.path[:] = {_module_path()!r}; "
            f"from nxd_trace.workers.fork_server import serve; serve({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is for the caller alone
            env={**os.environ, **_WITHOUT_SIDE_EFFECTS},
        )
        theirs.close()

    @property
    def fits(self) -> bool:
        """Whether it runs, and would load the libraries as this process would now."""
        is_ours = self._owner == os.getpid()  # and not that of a process that this one was forked from
        has_ended = self._process.poll() is not None or _is_readable(
            self._connection.fileno(), 0
        )  # says nothing unasked
        return is_ours and not has_ended and self._variables == _variables_read_when_loaded()

    def fork(self, settings: Mapping[str, Any], descriptors: Mapping[str, int], environment: Mapping[str, str]) -> int:
        """Have it fork a worker; the worker's process id."""
        request = {
            "settings": settings,
            "environment": dict(environment),
            "folder": os.getcwd(),
            "path": _module_path(),
        }
        body = json.dumps(request).encode()
        answer = b""
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._connection, [LENGTH.pack(len(body))], [descriptors[name] for name in DESCRIPTORS])
            self._connection.sendall(body)
            answer = self._connection.recv(PROCESS_ID.size)
        if not answer:
            raise ConnectionError("the process that forks workers exited before it forked one; see its output")
        pid: int = PROCESS_ID.unpack(answer)[0]
        return pid

    def close(self) -> None:
        """Let it end, once the workers that it has forked have."""
        self._connection.close()


_lock = threading.Lock()
_servers: list[ForkServer] = []  # at most one


def start_fork_server() -> None:
    """Start the process that workers are forked from, unless it runs; it loads libraries while this one continues."""
    with _lock:
        _start_fitting_server()


def _start_fitting_server() -> None:
    if _servers and not _servers[0].fits:
        _servers.pop().close()
    if not _servers:
        _servers.append(ForkServer())


def launch(
    settings: Mapping[str, Any], descriptors: Mapping[str, int], environment: Mapping[str, str]
) -> LaunchedProcess:
    """Start a worker process, in a session of its own.

    Args:
        settings: for the worker's `main`, beside the descriptors.
        descriptors: "stdin", "connection", "memory", "store" and "stacks". Output goes where this process's does.
        environment: the worker's variables; OMP_NUM_THREADS must be one of them.

    Raises:
        ConnectionError: the server has ended.
    """
    with _lock, contextlib.ExitStack() as ours:
        _start_fitting_server()
        status, theirs = os.pipe()
        ours.callback(os.close, theirs)
        outputs = {"stdout": _open_or_null(1, ours), "stderr": _open_or_null(2, ours)}
        try:
            pid = _servers[0].fork(settings, {**descriptors, **outputs, "status": theirs}, environment)
        except BaseException:
            _servers.pop().close()  # its progress is unknown
            os.close(status)
            raise
    return LaunchedProcess(pid, status)


def _is_readable(descriptor: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * timeout))


def _open_or_null(descriptor: int, closing: contextlib.ExitStack) -> int:
    """The descriptor, or one of nothing where it is closed."""
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return descriptor
    null = os.open(os.devnull, os.O_RDWR)
    closing.callback(os.close, null)
    return null


def _module_path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]


def _variables_read_when_loaded() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ_WHEN_LOADED) and name != "TORCHINDUCTOR_CACHE_DIR"  # which inductor sets by itself
    }
