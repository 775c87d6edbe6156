"""An interpreter that starts in milliseconds: a process that has torch loaded, and becomes the program in a fork.

The tests start hundreds of Python programs, and importing torch and transformers takes each of them seconds. `start`
starts a server that imports them once, and writes an executable that stands in for `python`: `forked_python`, which
asks the server for a fork, hands over its descriptors, and waits. What a fork could not be (other options of the
interpreter, variables that are read when libraries are loaded, a terminal) runs in a fresh interpreter.

There are two servers, of different hash seeds and addresses, and programs use them in turn: so ranks that iterate
over sets still do it in different orders, as in interpreters of their own.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import forked_python

# Before the first program, and then whenever there is nothing else to do.
LOADED_FIRST = ("nxd_ckpt", "nxd_testing.worker", "nxd_layers", "nxd_optim", "nxd_pipeline", "nxd_engine")
LOADED_LATER = (
    "torch.distributed.run",
    "transformers.models.auto.modeling_auto",
    "nxd_trace.workers.main",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._export.serde.serialize",
    "torch.export.pt2_archive",
    "peft",
)
NUM_SERVERS = 2
COVERAGE = "COVERAGE_PROCESS_CONFIG"  # set where programs are measured; forks begin it, not the server
PR_SET_PDEATHSIG = 1
# Of the servers: libraries start no threads and no processes while they are loaded, which a fork would lack.
VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_WARM_POOL": "0"}


@dataclass(frozen=True)
class Program:
    """What a client asks for.

    Attributes:
        arguments: of the interpreter, from the first of -c, -m and the script on.
        unbuffered: whether output is written at once (-u).
        environment: its variables.
        folder: its working directory.
        descriptors: the numbers of the descriptors that were sent with it.
        ignored_signals: those that the client found ignored.
        executable: what `sys.executable` is to be.
    """

    arguments: list[str]
    unbuffered: bool
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    ignored_signals: list[int]
    executable: str


def start(folder: Path) -> "tuple[Path, list[subprocess.Popen[bytes]]]":
    """Start the servers.

    Args:
        folder: an empty one, which holds the executable and the servers' sockets.

    Returns:
        The executable, and the servers. They end when their standard input is closed, and their forks with them.
    """
    servers = []
    for number in range(NUM_SERVERS):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(folder / str(number)))
        listening.listen(128)
        environment = {**os.environ, **VARIABLES, "PYTHONHASHSEED": str(number + 1)}
        for name in ("PYTHONPATH", COVERAGE):
            environment.pop(name, None)
        servers.append(
            subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listening.fileno()],
                env=environment,
                start_new_session=True,
            )
        )
        listening.close()
    variables = forked_python.variables_read_when_loaded()
    session = {"python": sys.executable, "variables": variables, "num_servers": NUM_SERVERS}
    (folder / "session.json").write_text(json.dumps(session))
    executable = folder / "python"
    # Without site-packages, of which the client needs nothing.
    executable.write_text(f"#!{os.path.realpath(sys.executable)} -SEs\n{Path(forked_python.__file__).read_text()}")
    executable.chmod(0o700)
    return executable, servers


def main(listening: socket.socket) -> None:
    """Serve until standard input is closed; in a fork, run the program."""
    del sys.path[0]  # the folder of this file
    for name in LOADED_FIRST:
        _load(name)
    program = _Server(listening).serve()
    if program is not None:
        _run(program)


def _load(name: str) -> None:
    with contextlib.suppress(ImportError):  # a package that is tested alone lacks the others
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or a collection in a fork would touch, and so copy, all of it


class _Server:
    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._to_load = list(LOADED_LATER)
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, socket.socket | None] = {}  # by process id of their forks; None once it is gone
        self._ended, self._wakeup = os.pipe()  # gets a byte whenever a fork ends
        for descriptor in (self._ended, self._wakeup):
            os.set_blocking(descriptor, False)

    def serve(self) -> Program | None:
        """Fork for each client; in a fork, return its program."""
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._selector.register(self._listening, selectors.EVENT_READ)
        while True:
            events = self._selector.select(timeout=0 if self._to_load else None)
            if not events:
                _load(self._to_load.pop(0))
            for key, _ in events:
                if key.fd == 0:
                    return None
                if key.fd == self._ended:
                    self._report_ended()
                elif key.data is not None:
                    self._end_group_of(key.data)
                elif (program := self._fork()) is not None:
                    return program

    def _fork(self) -> Program | None:
        client, _ = self._listening.accept()
        request = _receive(client)
        if request is None:
            client.close()
            return None
        program, descriptors = request
        server = os.getpid()
        child = os.fork()
        if child == 0:
            # Of a server that is killed nothing is left behind.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            self._leave(client)
            _become(program, descriptors)
            return program
        for descriptor in descriptors:
            os.close(descriptor)
        self._clients[child] = client
        self._selector.register(client, selectors.EVENT_READ, data=child)
        with contextlib.suppress(OSError):
            client.sendall(struct.pack("=q", child))
        return None

    def _leave(self, client: socket.socket) -> None:
        """In a fork: close what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for connection in (self._listening, client, *filter(None, self._clients.values())):
            connection.close()
        os.close(self._ended)
        os.close(self._wakeup)

    def _report_ended(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._ended, 1 << 10)
        for child in list(self._clients):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                client = self._clients.pop(child)
                if client is not None:
                    self._selector.unregister(client)
                    with contextlib.suppress(OSError):
                        client.sendall(struct.pack("=q", os.waitstatus_to_exitcode(status)))
                    client.close()

    def _end_group_of(self, child: int) -> None:
        """The client is gone, so its program ends as it would have with it."""
        client = self._clients.get(child)  # gone if the program has ended, too, and that was heard first
        if client is not None:
            try:
                os.killpg(child, signal.SIGKILL)
            except (
                ProcessLookupError
            ):  # it has no group of its own yet, or has ended, and keeps its number until waited for
                os.kill(child, signal.SIGKILL)
            self._selector.unregister(client)
            client.close()
            self._clients[child] = None


def _receive(client: socket.socket) -> tuple[Program, list[int]] | None:
    """The client's request and the descriptors that came with it; None if it is gone."""
    header, descriptors, _, _ = socket.recv_fds(client, 8, 250)
    if len(header) < 8:
        return None
    (length,) = struct.unpack("=q", header)
    body = bytearray()
    while len(body) < length:
        part = client.recv(length - len(body))
        if not part:
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        body += part
    return Program(**json.loads(body)), descriptors


def _become(program: Program, descriptors: list[int]) -> None:
    """Take over what a process has of its parent."""
    os.setsid()
    above = max(*program.descriptors, *descriptors) + 1
    for moved, descriptor in enumerate(descriptors):
        os.dup2(descriptor, above + moved, inheritable=False)
        os.close(descriptor)
    for moved, number in enumerate(program.descriptors):
        os.dup2(above + moved, number)
        os.close(above + moved)
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        if number in program.ignored_signals:
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)


def _run(program: Program) -> NoReturn:
    """Be the interpreter that was asked for, and end as it would."""
    _reset_libraries()
    if program.unbuffered or os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.executable = program.executable
    sys.orig_argv = [program.executable, *program.arguments]
    sys.path[:0] = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    exit_code = 0
    try:
        _execute(*program.arguments)
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        exit_code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        _print_without_own_frames(error)
    _end(exit_code)


def _execute(kind: str, *arguments: str) -> None:
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    main_module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    if kind == "-m":
        sys.argv = ["-m", *arguments[1:]]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(arguments[0], None)  # it is loaded anew, as what is run
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined] # what `python -m` itself calls
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
        exec(compile(arguments[0], "<string>", "exec"), main_module.__dict__)
    else:
        sys.argv = [kind, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        main_module.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main_module.__dict__)


def _print_without_own_frames(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace  # read by what runs at exit
    sys.excepthook(type(error), error, trace)


def _end(exit_code: int) -> NoReturn:
    """As at the end of an interpreter, but for taking all its modules apart, which takes half a second."""
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if exit_code < 0:
        signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code & 0xFF)


def _reset_libraries() -> None:
    """What libraries take from the environment, or from chance, when they are loaded."""
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    if torch is not None:
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        torch.set_num_threads(int(threads) if threads else os.cpu_count() or 1)
    if numpy is not None:
        numpy.random.seed()
    if COVERAGE in os.environ:
        importlib.import_module("coverage").process_startup()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
