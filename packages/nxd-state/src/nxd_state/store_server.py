"""The key-value store through which the ranks of one machine meet, which serves this user's processes alone.

Its clients are torch's: `TCPStore(host, port, is_master=False)`. torch's own server answers everyone who finds its port
on the loopback interface, so any user of the machine could end a run or pose as one of its ranks. This one speaks the
same protocol, asks the kernel which user made a connection, and closes those of other users unread.

A request is a byte, which says what is asked, and its arguments. Numbers have 8 bytes in the machine's order; keys and
values begin with their length.

This file is a program, too, which serves a store and needs the standard library alone.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

_VALIDATE, _WAIT, _CANCEL_WAIT = 0, 6, 12
_MAGIC = 0x3C85F7CE  # what clients begin with
_MOST_KEYS = 128 * 1024  # in one request; this limit and the next two are those of torch's server
_LONGEST_KEY, _LONGEST_VALUE = 8 * 1024, 8 * 1024 * 1024  # bytes
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # all TCP connections of this machine, with their owners
_ESTABLISHED = "01"
_BACKLOG = 4096
_PAUSE = 0.01  # seconds


class StoreServer:
    """Serves a store to processes of this user until `close`, or until this process ends.

    Only Linux says whose a connection is. Elsewhere every process of the machine is served, as by torch's own server.

    Args:
        listener: a listening socket on the loopback interface, which the server takes over.

    Attributes:
        port: the port that it listens on.

    Raises:
        ValueError: other machines, whose users cannot be checked, could reach the listener.
    """

    def __init__(self, listener: socket.socket) -> None:
        host, self.port = listener.getsockname()[:2]
        if listener.family != socket.AF_INET or not host.startswith("127."):
            raise ValueError(f"a store at {host} could be reached by other machines; listen at 127.0.0.1")
        self._listener = socket.socket(fileno=listener.detach())
        self._listener.listen(_BACKLOG)
        self._lock = threading.Lock()  # held while what follows is read or changed
        self._values: dict[bytes, bytes] = {}
        self._queues: defaultdict[bytes, deque[bytes]] = defaultdict(deque)
        self._awaited: dict[socket.socket, list[bytes]] = {}  # by connection, what it waits for
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="nxd_state store", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set(self, key: str, value: str) -> None:
        """Set a key, as a client's `set` does."""
        with self._lock:
            self._set(b"/" + key.encode(), value.encode())  # a prefix that torch's clients put before all keys

    def close(self) -> None:
        """Close all connections and stop listening."""
        with self._lock:
            self._is_closed = True
            for connection in (self._listener, *self._connections):
                with suppress(OSError):  # it has ended by itself
                    connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_PAUSE)  # the client has gone meanwhile, or this process has too many files open
                continue
            if not _is_of_this_user(connection):
                connection.close()
                continue
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="nxd_state store", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one client's requests until it closes the connection or sends an invalid request."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError, EOFError, ValueError), connection, connection.makefile("rb") as stream:
            arguments = _Arguments(stream)
            while True:
                request = arguments.byte()
                if request == _VALIDATE:
                    arguments.magic()
                elif request == _WAIT:
                    self._wait(connection, arguments.keys())
                elif request == _CANCEL_WAIT:
                    with self._lock:
                        self._awaited.pop(connection, None)
                    connection.sendall(_WAIT_CANCELED)
                elif request in _ANSWERS:
                    connection.sendall(_ANSWERS[request](self, arguments))
                else:
                    break
        with self._lock:
            self._awaited.pop(connection, None)
            self._connections.discard(connection)

    def _wait(self, connection: socket.socket, keys: list[bytes]) -> None:
        with self._lock:
            if not self._has(keys):
                self._awaited[connection] = keys
                return
        connection.sendall(_STOP_WAITING)

    def _has(self, keys: list[bytes]) -> bool:
        return all(key in self._values or self._queues.get(key) for key in keys)

    def _set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        self._wake(key)

    def _wake(self, key: bytes) -> None:
        """Answer the clients all of whose awaited keys are now set."""
        for connection, keys in list(self._awaited.items()):
            if key in keys and self._has(keys):
                del self._awaited[connection]
                with suppress(OSError):  # its own thread will see that it has gone
                    connection.sendall(_STOP_WAITING)

    # One method for each request that is answered at once; `b""` where the client expects no answer.

    def _answer_set(self, arguments: "_Arguments") -> bytes:
        key, value = arguments.key(), arguments.value()
        with self._lock:
            self._set(key, value)
        return b""

    def _answer_compare_set(self, arguments: "_Arguments") -> bytes:
        key, expected, desired = arguments.key(), arguments.value(), arguments.value()
        with self._lock:
            if self._values.get(key, b"") == expected:
                self._set(key, desired)
            return _bytes(self._values.get(key, expected))

    def _answer_get(self, arguments: "_Arguments") -> bytes:
        key = arguments.key()
        with self._lock:
            return _bytes(self._values.get(key, b""))

    def _answer_add(self, arguments: "_Arguments") -> bytes:
        key, number = arguments.key(), arguments.number()
        with self._lock:
            number += int(self._values.get(key, b"0"))
            self._set(key, str(number).encode())
        return _number(number)

    def _answer_check(self, arguments: "_Arguments") -> bytes:
        keys = arguments.keys()
        with self._lock:
            return _READY if self._has(keys) else _NOT_READY

    def _answer_num_keys(self, arguments: "_Arguments") -> bytes:
        with self._lock:
            return _number(len(self._values))

    def _answer_delete_key(self, arguments: "_Arguments") -> bytes:
        key = arguments.key()
        with self._lock:
            return _number(int(self._values.pop(key, None) is not None))

    def _answer_append(self, arguments: "_Arguments") -> bytes:
        key, value = arguments.key(), arguments.value()
        with self._lock:
            self._set(key, self._values.get(key, b"") + value)
        return b""

    def _answer_multi_get(self, arguments: "_Arguments") -> bytes:
        keys = arguments.keys()
        with self._lock:
            return b"".join(_bytes(self._values.get(key, b"")) for key in keys)

    def _answer_multi_set(self, arguments: "_Arguments") -> bytes:
        pairs = [(arguments.key(), arguments.value()) for _ in range(arguments.count())]
        with self._lock:
            for key, value in pairs:
                self._set(key, value)
        return b""

    def _answer_ping(self, arguments: "_Arguments") -> bytes:
        return arguments.exactly(4)

    def _answer_queue_push(self, arguments: "_Arguments") -> bytes:
        key, value = arguments.key(), arguments.value()
        with self._lock:
            self._queues[key].append(value)
            self._wake(key)
        return b""

    def _answer_queue_pop(self, arguments: "_Arguments") -> bytes:
        key = arguments.key()
        with self._lock:
            queue = self._queues[key]
            return _number(len(queue)) + (_bytes(queue.popleft()) if queue else b"")

    def _answer_queue_len(self, arguments: "_Arguments") -> bytes:
        key = arguments.key()
        with self._lock:
            return _number(len(self._queues[key]))

    def _answer_list_keys(self, arguments: "_Arguments") -> bytes:
        with self._lock:
            return _number(len(self._values)) + b"".join(map(_bytes, self._values))


_ANSWERS: dict[int, Callable[[StoreServer, "_Arguments"], bytes]] = {
    1: StoreServer._answer_set,
    2: StoreServer._answer_compare_set,
    3: StoreServer._answer_get,
    4: StoreServer._answer_add,
    5: StoreServer._answer_check,
    7: StoreServer._answer_num_keys,
    8: StoreServer._answer_delete_key,
    9: StoreServer._answer_append,
    10: StoreServer._answer_multi_get,
    11: StoreServer._answer_multi_set,
    13: StoreServer._answer_ping,
    14: StoreServer._answer_queue_push,
    15: StoreServer._answer_queue_pop,
    16: StoreServer._answer_queue_len,
    17: StoreServer._answer_list_keys,
}


class _Arguments:
    """Parses arguments from a client's stream; raises EOFError at its end, ValueError for invalid ones."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def exactly(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def byte(self) -> int:
        return self.exactly(1)[0]

    def magic(self) -> None:
        if int.from_bytes(self.exactly(4), sys.byteorder) != _MAGIC:
            raise ValueError("the client does not speak the protocol of torch's store")

    def number(self) -> int:
        return int.from_bytes(self.exactly(8), sys.byteorder, signed=True)

    def count(self, most: int = _MOST_KEYS) -> int:
        count = self.number()
        if not 0 <= count <= most:
            raise ValueError(f"a client sent a count of {count}; expected 0..{most}")
        return count

    def key(self) -> bytes:
        return self.exactly(self.count(_LONGEST_KEY))

    def value(self) -> bytes:
        return self.exactly(self.count(_LONGEST_VALUE))

    def keys(self) -> list[bytes]:
        return [self.key() for _ in range(self.count())]


def _number(value: int) -> bytes:
    return value.to_bytes(8, sys.byteorder, signed=True)


def _bytes(value: bytes) -> bytes:
    return _number(len(value)) + value


def _is_of_this_user(connection: socket.socket) -> bool:
    """Whether a process of this user holds the other end of a connection within this machine.

    False also if the process has closed it already: the kernel then reports root as the owner.
    """
    if sys.platform != "linux":
        return True
    try:
        ends = connection.getpeername(), connection.getsockname()
    except OSError:  # it has been reset
        return False
    for row in _connections_between(*ends):
        state, owner, inode = row[3], row[7], row[9]
        if state == _ESTABLISHED and inode != "0":
            return int(owner) == os.geteuid()
    return False


def _connections_between(local: tuple[str, int], remote: tuple[str, int]) -> Iterator[list[str]]:
    """The rows of the kernel's tables with these ends; a socket of IPv6 can have them, too."""
    for table, prefix in zip(_TABLES, (b"", b"\0" * 10 + b"\xff\xff"), strict=True):
        ends = f" {_in_table(prefix, local)} {_in_table(prefix, remote)} "
        with suppress(FileNotFoundError):  # a machine without IPv6
            yield from (line.split() for line in table.read_text(encoding="ascii").splitlines() if ends in line)


def _in_table(prefix: bytes, end: tuple[str, int]) -> str:
    address = prefix + socket.inet_aton(end[0])
    words = (int.from_bytes(address[at : at + 4], sys.byteorder) for at in range(0, len(address), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"


def start_store_process(listener: socket.socket) -> "subprocess.Popen[bytes]":
    """Start a `StoreServer` in a process of its own, for a launcher that is a rank as well.

    In the launcher itself a client that holds the interpreter's lock while it waits for an answer, as `queue_len` of
    torch's does, would keep the server from giving it.

    Args:
        listener: the listening socket, see `StoreServer`; closed here.

    Returns:
        A process that ends when this one has ended, for whatever reason, or its `stdin` is closed.
    """
    with listener:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # ranks that get them, too, still have to agree on what to do
    with StoreServer(socket.socket(fileno=int(sys.argv[1]))):
        sys.stdin.read()  # until the process that has started this one has ended


if __name__ == "__main__":
    _main()
