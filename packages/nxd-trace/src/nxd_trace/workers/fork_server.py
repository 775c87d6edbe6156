"""The program of the fork server: a process that has torch and torch.export loaded, and forks workers.

A fresh interpreter takes seconds to load them, for every rank of every model; a fork takes milliseconds, and shares
their memory. The server computes nothing, so it has no threads of its own and no CUDA context, which a fork would
break. `launching` is the other end.
"""

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from nxd_state.processes import set_parent_death_signal

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
