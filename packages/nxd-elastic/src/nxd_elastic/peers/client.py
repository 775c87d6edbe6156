"""The client of the memory servers, with a connection per request: an open one may lead to a lost host."""

import hmac
import json
import math
import os
import secrets
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from nxd_ckpt.errors import CheckpointError

from nxd_elastic.peers.server import CLIENT, END, MOST_GREETING_BYTES, SECRET, SERVER, proof

_SECONDS_TO_CONNECT = 5.0
_SECONDS_TO_ANSWER = 60.0


class MemoryServerClient:
    """A client of one host's memory server. All methods raise OSError if it cannot be reached or refuses.

    Args:
        address: `host:port`, with an IPv6 host in brackets.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def put(self, name: str, num_bytes: int) -> "Upload":
        """Start to write a file of this size, which appears, or replaces another, when the upload is finished.

        The memory server reserves the space first; `Upload.finish` reports if there is none.
        """
        return Upload(_Connection(self.address), name, num_bytes)

    def get(self, name: str, pieces: "Sequence[tuple[int, memoryview]]") -> None:
        """Fill each memory with the file's bytes from an offset; raises FileNotFoundError if there is no such file."""
        asked = [[offset, memory.nbytes] for offset, memory in pieces]
        with self._answer_to(do="get", name=name, pieces=asked) as (_, connection):
            for _, memory in pieces:
                connection.read_into(memory.cast("B"))

    def content(self, name: str, most_bytes: int) -> bytes:
        """Return a whole file of at most this many bytes; raises like `get`."""
        with self._answer_to(do="get", name=name, pieces=None) as (answer, connection):
            size = int(answer["bytes"])
            if not 0 <= size <= most_bytes:
                raise OSError(f"{name} at memory server {self.address} has {size} bytes; expected at most {most_bytes}")
            content = bytearray(size)
            connection.read_into(memoryview(content))
        return bytes(content)

    def size(self, name: str) -> int:
        """Return the bytes of a file; raises like `get`."""
        with self._answer_to(do="size", name=name) as (answer, _):
            return int(answer["bytes"])

    def files(self, unchanged: float = -math.inf) -> dict[str, int]:
        """Return the sizes of files, by name; only of those unchanged for this many seconds, by the server's clock."""
        with self._answer_to(do="list", unchanged=unchanged) as (answer, _):
            return {str(name): int(size) for name, size in answer["files"].items()}

    def remove(self, names: Collection[str]) -> None:
        """Remove files; missing ones are ignored."""
        if names:
            with self._answer_to(do="remove", names=sorted(names)):
                pass

    @contextmanager
    def _answer_to(self, **request: Any) -> "Iterator[tuple[dict[str, Any], _Connection]]":
        with closing(_Connection(self.address)) as connection:
            connection.ask(request)
            yield connection.answer(), connection


class Upload:
    """An unfinished file on a memory server."""

    def __init__(self, connection: "_Connection", name: str, num_bytes: int) -> None:
        self._connection = connection
        connection.ask({"do": "put", "name": name, "bytes": num_bytes})

    def send(self, part: "bytes | memoryview") -> None:
        """Send the next bytes."""
        content = memoryview(part).cast("B")
        if content.nbytes:
            self._connection.send(f"{content.nbytes}\n".encode())
            self._connection.send(content)

    def finish(self) -> None:
        """Make the file appear; raises OSError if it could not be written."""
        self._connection.send(END)
        self._connection.answer()
        self.close()

    def close(self) -> None:
        """Close the connection, which discards an unfinished file."""
        self._connection.close()


class _Connection:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        with self._errors_named():
            self._socket = socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_CONNECT)
        self._socket.settimeout(_SECONDS_TO_ANSWER)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        try:
            self._prove(_secret(), int(port))
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> None:
        self.send(json.dumps(request).encode() + b"\n")

    def send(self, content: "bytes | memoryview") -> None:
        with self._errors_named():
            self._socket.sendall(content)

    def answer(self, most_bytes: int = -1) -> dict[str, Any]:
        with self._errors_named():
            line = self._file.readline(most_bytes)
        if not line.endswith(b"\n"):
            raise self._gone()
        try:
            answer: dict[str, Any] = dict(json.loads(line))
        except (ValueError, TypeError):
            raise OSError(f"{self._address} is not a memory server of this job") from None
        if "refused" in answer:
            kind = FileNotFoundError if answer.get("missing") else OSError
            raise kind(f"memory server {self._address}: {answer['refused']}")
        return answer

    def _prove(self, secret: str, port: int) -> None:
        """Do the handshake of `server.py`: nothing is exchanged with a server that does not know the secret."""
        with self._errors_named():
            theirs = self._file.readline(MOST_GREETING_BYTES).decode("ascii", "replace").strip()
        nonces = (theirs, secrets.token_hex(16))
        self.send(f"{nonces[1]} {proof(secret, CLIENT, nonces, port)}\n".encode())
        found = self.answer(MOST_GREETING_BYTES).get("proof")
        if not hmac.compare_digest(str(found).encode(), proof(secret, SERVER, nonces, port).encode()):
            raise OSError(f"{self._address} is not a memory server of this job")

    def read_into(self, memory: memoryview) -> None:
        left = memory
        while left:
            with self._errors_named():
                count = self._file.readinto(left)
            if not count:
                raise self._gone()
            left = left[count:]

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(f"memory server {self._address} cannot be reached: {error}") from error

    def _gone(self) -> OSError:
        return OSError(f"memory server {self._address} closed the connection")


def _secret() -> str:
    secret = os.environ.get(SECRET)
    if not secret:
        raise CheckpointError(f"{SECRET} is not set; all ranks and memory servers of a job need the same value")
    return secret
