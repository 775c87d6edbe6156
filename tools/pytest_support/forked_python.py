"""The client of `fork_server`: stands in for `python`, and ends as the program ends that it had forked.

`fork_server.start` copies this file to a folder of its own, beside `session.json` (the interpreter that it stands in
for, and the servers' variables) and the servers' sockets, "0" and so on.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGABRT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# Read when the interpreter or a library is loaded, which in the server has been done.
READ_WHEN_LOADED = ("CUDA", "GOMP", "HF_", "KMP", "LD_", "MALLOC", "MKL", "PJRT", "PYTHON", "PYTORCH", "TORCH", "XLA")
READ_LATER = (
    "PYTHONFAULTHANDLER",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_NCCL_",
    "TORCH_WARM_POOL",
)


def main() -> None:
    """Run the program in a fork, or else in a fresh interpreter."""
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "session.json")) as file:
        session = json.load(file)
    arguments = sys.argv[1:]
    unbuffered = arguments[:1] == ["-u"]
    if unbuffered:
        del arguments[0]
    connection = socket.socket(socket.AF_UNIX)
    try:
        if not _is_plain_program(arguments) or variables_read_when_loaded() != session["variables"]:
            raise ConnectionRefusedError
        connection.connect(os.path.join(folder, str(os.getpid() % session["num_servers"])))
    except OSError:  # which a server that is gone makes, too
        os.execv(session["python"], [session["python"], *sys.argv[1:]])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # none is lost that comes before it can be handed on
    _send(connection, arguments, unbuffered=unbuffered)
    child = _receive(connection)
    _forward_signals(child, connection)
    _end_with(_receive(connection))


def variables_read_when_loaded() -> dict[str, str]:
    """Of this process: a program with others than the server's needs an interpreter of its own."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(READ_WHEN_LOADED) and not name.startswith(READ_LATER)
    }


def _is_plain_program(arguments: list[str]) -> bool:
    """Whether the arguments have no further options of the interpreter, and no terminal shows what it prints."""
    at_terminal = any(_is_open(number) and os.isatty(number) for number in range(3))
    return not at_terminal and (arguments[:1] in (["-c"], ["-m"]) or "".join(arguments[:1]).endswith(".py"))


def _send(connection: socket.socket, arguments: list[str], *, unbuffered: bool) -> None:
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    descriptors = [number for number in numbers if number != connection.fileno() and _is_open(number)]
    request = {
        "arguments": arguments,
        "unbuffered": unbuffered,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": descriptors,
        "ignored_signals": [number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN],
        "executable": os.path.abspath(__file__),
    }
    body = json.dumps(request).encode()
    socket.send_fds(connection, [struct.pack("=q", len(body))], descriptors)
    connection.sendall(body)
    for number in descriptors:  # the program's alone from now on
        os.close(number)


def _forward_signals(child: int, connection: socket.socket) -> None:
    """Until there is an answer. Signals come as bytes of a pipe: a handler may not run before a call that waits."""
    came, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in FORWARDED:  # also those that are ignored, until the program says otherwise
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    answer = connection.fileno()
    while answer not in (ready := select.select([answer, came], [], [])[0]) or came in ready:
        for byte in os.read(came, 64) if came in ready else b"":
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(child, byte)


def _receive(connection: socket.socket) -> int:
    answer = connection.recv(8, socket.MSG_WAITALL)
    if len(answer) < 8:
        os._exit(1)  # the server has ended, and the program with it
    number: int = struct.unpack("=q", answer)[0]
    return number


def _end_with(returncode: int) -> None:
    """End as `subprocess` says that the program did."""
    if returncode < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -returncode != signal.SIGKILL:
            signal.signal(-returncode, signal.SIG_DFL)
        os.kill(os.getpid(), -returncode)
    os._exit(returncode)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
