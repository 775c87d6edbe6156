"""The fork server: a process with torch and torch.export loaded that forks workers, and the calls that use it.

A new interpreter takes seconds to load these libraries, for every rank of every model. A fork takes milliseconds and
shares their memory. The server starts with this process's first worker and ends with this process. It computes nothing,
so it has no threads and no CUDA context, which a fork would break.
"""

import contextlib
import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from nxd_state.processes import hold_standard_streams, set_parent_death_signal

_PRELOADED = ("nxd_trace.workers.main", "torch._dynamo")

_LENGTH = struct.Struct("=Q")  # before a request
_PROCESS_ID = struct.Struct("=Q")  # the answer to a request
_EXIT_CODE = struct.Struct("=i")  # written to a worker's `status`, as `subprocess.Popen.returncode`
# Sent with each request.
_DESCRIPTORS = ("stdin", "stdout", "stderr", "connection", "memory", "store", "stacks", "status")

# Libraries read these variables when they are loaded: if one changes, a new server is needed.
_READ_WHEN_LOADED = (
    *("CUDA", "GOMP", "KMP", "LD_", "MKL", "NXD", "OMP"),
    *("OPENBLAS", "PJRT", "PYTHON", "PYTORCH", "TORCH"),
)

# For the server, which loads libraries without anything that a fork would break.
_WITHOUT_SIDE_EFFECTS = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # checks for CUDA without creating a context
    "TORCH_WARM_POOL": "0",  # no compile workers
}


class LaunchedProcess:
    """A process that the server has forked."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._status = status
        self._exit_code: int | None = None

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, as `subprocess.Popen.returncode`; None if the process runs longer than this."""
        if self._exit_code is None and _is_readable(self._status, timeout):
            code = os.read(self._status, _EXIT_CODE.size)
            os.close(self._status)
            self._exit_code = _EXIT_CODE.unpack(code)[0] if code else 1  # unknown if the server has ended
        return self._exit_code


def launch(
    settings: Mapping[str, Any], descriptors: Mapping[str, int], environment: Mapping[str, str]
) -> LaunchedProcess:
    """Start a worker process in its own session.

    Args:
        settings: settings of the worker's `main`, without descriptors.
        descriptors: "stdin", "connection", "memory", "store" and "stacks". Output goes where this process's goes.
        environment: the worker's environment variables, including OMP_NUM_THREADS.

    Raises:
        ConnectionError: the server has ended.
    """
    with _lock, contextlib.ExitStack() as ours:
        _start_server()
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


def start_fork_server() -> None:
    """Start the server unless it is running; it loads libraries while this process continues."""
    with _lock:
        _start_server()


class _ServerConnection:
    """The server, from the process that uses it."""

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
            start_new_session=True,  # Ctrl-C is only for the caller
            env={**os.environ, **_WITHOUT_SIDE_EFFECTS},
        )
        theirs.close()

    @property
    def is_usable(self) -> bool:
        """Whether it is running, and has loaded its libraries as this process would now."""
        is_ours = self._owner == os.getpid()  # and not that of a parent which forked this process
        # It sends nothing on its own, so a readable connection has been closed.
        has_ended = self._process.poll() is not None or _is_readable(self._connection.fileno(), 0)
        return is_ours and not has_ended and self._variables == _variables_read_when_loaded()

    def fork(self, settings: Mapping[str, Any], descriptors: Mapping[str, int], environment: Mapping[str, str]) -> int:
        """Fork a worker and return its process id."""
        request = {
            "settings": settings,
            "environment": dict(environment),
            "folder": os.getcwd(),
            "path": _module_path(),
        }
        body = json.dumps(request).encode()
        answer = b""
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._connection, [_LENGTH.pack(len(body))], [descriptors[name] for name in _DESCRIPTORS])
            self._connection.sendall(body)
            answer = self._connection.recv(_PROCESS_ID.size)
        if not answer:
            raise ConnectionError("the process that forks workers exited before it forked one; see its output")
        pid: int = _PROCESS_ID.unpack(answer)[0]
        return pid

    def close(self) -> None:
        """Let the server end once its workers have ended."""
        self._connection.close()


_lock = threading.Lock()
_servers: list[_ServerConnection] = []  # at most one


def _start_server() -> None:
    if _servers and not _servers[0].is_usable:
        _servers.pop().close()
    if not _servers:
        _servers.append(_ServerConnection())


def _is_readable(descriptor: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * timeout))


def _open_or_null(descriptor: int, closing: contextlib.ExitStack) -> int:
    """Return the descriptor; if it is closed, a descriptor of /dev/null."""
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


def serve(descriptor: int) -> None:
    """Run the server: fork a worker per request and report how it ends, until no client and no worker is left."""
    # Otherwise a server that is stopped while its client ends would remain, with its workers.
    set_parent_death_signal(signal.SIGCONT)
    for name in _PRELOADED:
        importlib.import_module(name)
    _Server(socket.socket(fileno=descriptor)).run()


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._status: dict[int, int] = {}  # descriptor for the exit code, by the worker's process id
        self._stdin: dict[int, int] = {}  # descriptor that reads as closed once the worker's client has ended
        self._selector = selectors.DefaultSelector()
        self._ended, ended = os.pipe()  # gets a byte whenever a child ends
        os.set_blocking(self._ended, False)
        os.set_blocking(ended, False)
        signal.set_wakeup_fd(ended, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._inherited = (connection.fileno(), self._ended, ended)

    def run(self) -> None:
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._selector.register(self._connection, selectors.EVENT_READ)
        has_client = True
        while has_client or self._status:
            for key, _ in self._selector.select():
                if key.fd == self._ended:
                    self._report_ended()
                elif key.data is not None:
                    self._kill(key.data)
                elif not self._fork_one():
                    self._selector.unregister(self._connection)
                    has_client = False

    def _fork_one(self) -> bool:
        """Serve a request; returns False once the client has closed the connection."""
        header, descriptors, _, _ = socket.recv_fds(self._connection, _LENGTH.size, len(_DESCRIPTORS))
        if not header:
            return False
        body = bytearray()
        while len(body) < _LENGTH.unpack(header)[0]:
            body += self._connection.recv(1 << 16)
        child = os.fork()
        if child == 0:
            self._become_worker(json.loads(body), descriptors)
        given = dict(zip(_DESCRIPTORS, descriptors, strict=True))
        self._status[child] = given.pop("status")
        self._stdin[child] = given.pop("stdin")
        self._selector.register(self._stdin[child], selectors.EVENT_READ, data=child)
        for descriptor in given.values():
            os.close(descriptor)
        self._connection.sendall(_PROCESS_ID.pack(child))
        return True

    def _report_ended(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._ended, 1 << 10)
        for child in list(self._status):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                descriptor = self._status.pop(child)
                with contextlib.suppress(BrokenPipeError):  # the client has ended
                    os.write(descriptor, _EXIT_CODE.pack(os.waitstatus_to_exitcode(status)))
                os.close(descriptor)
                self._close_stdin(child)

    def _kill(self, child: int) -> None:
        """Kill a worker whose client has ended. The worker notices by itself, unless it is stopped."""
        if child in self._stdin:  # otherwise it has ended
            self._close_stdin(child)
            try:
                os.killpg(child, signal.SIGKILL)  # including the compiler
            except ProcessLookupError:  # it has no process group of its own yet
                os.kill(child, signal.SIGKILL)

    def _close_stdin(self, child: int) -> None:
        if (descriptor := self._stdin.pop(child, None)) is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _become_worker(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Run the worker in the child, without anything of the server; does not return."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            self._selector.close()
            given = dict(zip(_DESCRIPTORS, descriptors, strict=True))
            for descriptor in (*self._inherited, *self._status.values(), *self._stdin.values(), given["status"]):
                os.close(descriptor)
            for target, name in enumerate(("stdin", "stdout", "stderr")):
                os.dup2(given[name], target)
                os.close(given[name])
            _set_environment(request)
            main = importlib.import_module("nxd_trace.workers.main").main
            kept = {name: given[name] for name in ("connection", "memory", "store", "stacks")}
            main({**request["settings"], **kept})
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)


def _set_environment(request: dict[str, Any]) -> None:
    """Set what a process inherits from its parent: environment, working directory, module path."""
    import torch  # noqa: PLC0415 - the server has loaded it, but its clients need not

    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    num_threads = os.environ["OMP_NUM_THREADS"].partition(",")[0]  # further numbers are for nested loops
    torch.set_num_threads(int(num_threads))  # OpenMP read the variable when it was loaded
