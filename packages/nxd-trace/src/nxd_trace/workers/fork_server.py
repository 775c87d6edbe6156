"""The program of the fork server: a process that has torch and torch.export loaded, and forks workers.

A fresh interpreter takes seconds to load them, for every rank of every model; a fork takes milliseconds, and shares
their memory. The server computes nothing, so it has no threads of its own and no CUDA context, which a fork would
break. `launching` is the other end.
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


LENGTH = struct.Struct("=Q")  # before a request


PROCESS_ID = struct.Struct("=Q")  # the answer to one


EXIT_CODE = struct.Struct("=i")  # what is written to a worker's `status`, as of `subprocess.Popen.returncode`


DESCRIPTORS = (
    "stdin",
    "stdout",
    "stderr",
    "connection",
    "memory",
    "store",
    "stacks",
    "status",
)  # sent with each request


def serve(descriptor: int) -> None:
    """Fork a worker per request, and report how each has ended; return when no client is left.

    Args:
        descriptor: descriptor of the socket that requests come from.
    """
    # Otherwise a server that is stopped when its client ends would stay, and its workers with it.
    set_parent_death_signal(signal.SIGCONT)
    for name in _PRELOADED:
        importlib.import_module(name)
    _Server(socket.socket(fileno=descriptor)).run()


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._status: dict[int, int] = {}  # descriptor to report to by process id of the worker
        self._stdin: dict[int, int] = {}  # descriptor that reads as closed once the worker's client has ended
        self._selector = selectors.DefaultSelector()
        self._ended, ended = os.pipe()  # gets a byte whenever a child ends
        os.set_blocking(self._ended, False)
        os.set_blocking(ended, False)
        signal.set_wakeup_fd(ended, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._inherited = (connection.fileno(), self._ended, ended)

    def run(self) -> None:
        """Until the other end of the connection is closed, and the last worker has ended."""
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._selector.register(self._connection, selectors.EVENT_READ)
        is_asked = True
        while is_asked or self._status:
            for key, _ in self._selector.select():
                if key.fd == self._ended:
                    self._report_ended()
                elif key.data is not None:
                    self._kill(key.data)
                elif not self._fork_one():
                    self._selector.unregister(self._connection)
                    is_asked = False

    def _fork_one(self) -> bool:
        """Serve a request; False if there will be none any more."""
        header, descriptors, _, _ = socket.recv_fds(self._connection, LENGTH.size, len(DESCRIPTORS))
        if not header:
            return False
        body = bytearray()
        while len(body) < LENGTH.unpack(header)[0]:
            body += self._connection.recv(1 << 16)
        child = os.fork()
        if child == 0:
            self._become_worker(json.loads(body), descriptors)
        given = dict(zip(DESCRIPTORS, descriptors, strict=True))
        self._status[child] = given.pop("status")
        self._stdin[child] = given.pop("stdin")
        self._selector.register(self._stdin[child], selectors.EVENT_READ, data=child)
        for descriptor in given.values():
            os.close(descriptor)
        self._connection.sendall(PROCESS_ID.pack(child))
        return True

    def _report_ended(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._ended, 1 << 10)
        for child in list(self._status):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                descriptor = self._status.pop(child)
                with contextlib.suppress(BrokenPipeError):  # no client is left
                    os.write(descriptor, EXIT_CODE.pack(os.waitstatus_to_exitcode(status)))
                os.close(descriptor)
                self._forget_stdin(child)

    def _kill(self, child: int) -> None:
        """Its client has ended. The worker notices that as well, unless it is stopped."""
        if child in self._stdin:  # else it has ended since
            self._forget_stdin(child)
            try:
                os.killpg(child, signal.SIGKILL)  # with the compiler
            except ProcessLookupError:  # it has no group of its own yet
                os.kill(child, signal.SIGKILL)

    def _forget_stdin(self, child: int) -> None:
        if (descriptor := self._stdin.pop(child, None)) is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _become_worker(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        """In the child: leave everything of the server's behind; does not return."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            self._selector.close()
            given = dict(zip(DESCRIPTORS, descriptors, strict=True))
            for descriptor in (*self._inherited, *self._status.values(), *self._stdin.values(), given["status"]):
                os.close(descriptor)
            for target, name in enumerate(("stdin", "stdout", "stderr")):
                os.dup2(given[name], target)
                os.close(given[name])
            _take_over(request)
            main = importlib.import_module("nxd_trace.workers.main").main
            kept = {name: given[name] for name in ("connection", "memory", "store", "stacks")}
            main({**request["settings"], **kept})
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)


def _take_over(request: dict[str, Any]) -> None:
    """What a process has of its parent: environment, working directory, path of modules."""
    import torch  # noqa: PLC0415 - loaded already, but not by who sends requests

    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    num_threads = os.environ["OMP_NUM_THREADS"].partition(",")[0]  # more would be for nested loops
    torch.set_num_threads(int(num_threads))  # OpenMP has read the variable when it was loaded


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
