"""Keeps files in the memory of a host, for ranks of any host of a job: a small server of one folder.

The folder lies in a file system that is memory (`/dev/shm`), so what is kept outlives the ranks, and this process, and
ends with the host. Run as a program it needs the standard library alone, so that it starts at once and stays small.

Messages are a line of JSON, requests as well as answers; contents follow it. A request names the secret of the job:
whoever does not know it can neither read nor write. Contents are not encrypted.
"""

import contextlib
import fcntl
import hmac
import json
import os
import re
import shutil
import socket
import socketserver
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

SECRET = "NXD_PEERS_SECRET"  # variable of the environment that holds the secret
END = b"0\n"  # after the last part of a file that is put

PINS = ".pins"  # a folder that is no checkpoint's

_NAME = re.compile(rf"({re.escape(PINS)}/)?[^/\0.][^/\0]*(/[^/\0.][^/\0]*)*")
_PARTIAL = ".partial"  # where files lie until they are whole
_MOST_LINE_BYTES = 1 << 24
_SECONDS_TO_LEAVE = 10.0


class Refused(Exception):
    """What a request asks for cannot be done; the text says why."""


class Keeper(socketserver.ThreadingTCPServer):
    """Serves a folder until it is shut down.

    Args:
        folder: where files lie; made if missing, for this user alone.
        host: the address to listen at, by which other hosts reach this one.
        secret: of the job.

    Raises:
        OSError: the folder cannot be made, or another keeper serves it.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, folder: Path, host: str, secret: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.secret = secret
        self._lock = _locked(folder / ".lock")
        shutil.rmtree(folder / _PARTIAL, ignore_errors=True)
        (folder / _PARTIAL).mkdir()
        super().__init__((host, 0), _Conversation)

    @property
    def address(self) -> str:
        """`host:port`."""
        host, port = self.server_address[:2]
        return f"{host if isinstance(host, str) else host.decode()}:{port}"

    def path_of(self, name: object) -> Path:
        """Where a file lies.

        Raises:
            Refused: it is no name of a file.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Refused(f"{name!r} is no name of a file")
        return self.folder / name

    def server_close(self) -> None:
        """See `socketserver`; the folder is free for another keeper."""
        super().server_close()
        os.close(self._lock)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that ends early is how ranks die: nothing to say."""


def _locked(path: Path) -> int:
    """A descriptor that locks the file, which the keeper before may still be about to leave."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _SECONDS_TO_LEAVE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise OSError(f"{path.parent} is served by another keeper; use another folder") from None
            time.sleep(0.05)


class _Conversation(socketserver.StreamRequestHandler):
    """One connection: requests until it is closed."""

    server: Keeper
    disable_nagle_algorithm = True

    def handle(self) -> None:
        actions: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "put": self._put,
            "get": self._get,
            "size": self._size,
            "list": self._list,
            "remove": self._remove,
        }
        while (line := self.rfile.readline(_MOST_LINE_BYTES)).endswith(b"\n"):
            request = json.loads(line)
            if not hmac.compare_digest(str(request.get("secret")).encode(), self.server.secret.encode()):
                self._answer({"refused": "the secret is not that of this job"})
                return
            try:
                answer = actions[request["do"]](request)
            except (Refused, FileNotFoundError) as error:
                answer = {"refused": str(error), "missing": isinstance(error, FileNotFoundError)}
            except OSError as error:
                answer = {"refused": f"{type(error).__name__}: {error}"}
            if answer:
                self._answer(answer)

    def _answer(self, answer: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(answer).encode() + b"\n")

    def _put(self, request: dict[str, Any]) -> dict[str, Any]:
        """Parts as lines with their length, each followed by its bytes; the file appears when all are there."""
        problem: Exception | None = None
        partial = self.server.folder / _PARTIAL / uuid.uuid4().hex
        try:
            with partial.open("xb", buffering=0) as file:
                while (line := self.rfile.readline(32)) != END:
                    left = int(line)
                    if left <= 0:
                        raise ConnectionError(f"a part of {left} bytes")
                    while left:
                        content = self.rfile.read1(min(left, 1 << 20))
                        if not content:
                            raise ConnectionError("the file ends early")
                        left -= len(content)
                        problem = problem or _written(file, content)
            if problem is not None:
                raise problem
            target = self.server.path_of(request["name"])
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
        return {"done": True}

    def _get(self, request: dict[str, Any]) -> dict[str, Any]:
        """Stretches of a file, one after the other."""
        path = self.server.path_of(request["name"])
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            pieces = request["pieces"] if request["pieces"] is not None else [[0, size]]
            if any(start + length > size for start, length in pieces):
                raise Refused(f"{request['name']} has {size} bytes, fewer than are asked for")
            self._answer({"bytes": sum(length for _, length in pieces)})
            for start, length in pieces:
                if length:
                    self.connection.sendfile(file, start, length)
        return {}

    def _size(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"bytes": self.server.path_of(request["name"]).stat().st_size}

    def _list(self, request: dict[str, Any]) -> dict[str, Any]:
        """Names and sizes of all files."""
        folder = self.server.folder
        found = {}
        for parent, _, names in os.walk(folder):
            for name in names:
                path = Path(parent, name)
                relative = str(path.relative_to(folder))
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if _NAME.fullmatch(relative):
                        found[relative] = path.stat().st_size
        return {"files": found}

    def _remove(self, request: dict[str, Any]) -> dict[str, Any]:
        """Files, and the folders that they leave empty."""
        for name in request["names"]:
            path = self.server.path_of(name)
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there are others
                for parent in list(path.parents)[: name.count("/")]:
                    parent.rmdir()
        return {"done": True}


def _written(file: IO[bytes], content: bytes) -> OSError | None:
    """The error, so that the rest can be read from the connection."""
    left = memoryview(content)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        return error
    return None


def main() -> None:
    """`keeper.py FOLDER HOST`: says its address in a line, and serves until standard input ends."""
    folder, host = sys.argv[1:]
    keeper = Keeper(Path(folder), host, os.environ[SECRET])
    print(keeper.address, flush=True)
    threading.Thread(target=keeper.serve_forever, daemon=True).start()
    with contextlib.suppress(ConnectionError):
        while sys.stdin.buffer.read(1):
            pass


def is_reachable(address: str, timeout: float = 1.0) -> bool:
    """Whether a keeper listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
