"""The memory server: keeps files in the memory of a host, for the ranks of a job on any host.

It serves a folder in a file system in memory (`/dev/shm`), so the files outlive the ranks and this process, and are
lost with the host. As a program it needs only the standard library, so it starts fast and stays small.

A connection starts with a handshake in which both sides prove that they know the job's secret, without sending it.
Others can neither read nor write, nor impersonate a memory server that has ended. Requests and answers are lines of
JSON, followed by contents, which are not encrypted.
"""

import contextlib
import errno
import fcntl
import hmac
import json
import os
import re
import secrets
import shutil
import socket
import socketserver
import stat
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

SECRET = "NXD_PEERS_SECRET"  # the environment variable with the secret
END = b"0\n"  # after the last part of an uploaded file
SERVER, CLIENT = "server", "client"  # the two sides of a proof
MOST_GREETING_BYTES = 256  # in a line of the handshake, before which nothing else is read

PINS = ".pins"  # a folder beside those of checkpoints

_NAME = re.compile(rf"({re.escape(PINS)}/)?[^/\0.][^/\0]*(/[^/\0.][^/\0]*)*")
_PARTIAL = ".partial"  # folder of unfinished files
_MOST_LINE_BYTES = 1 << 24
_SECONDS_TO_LEAVE = 10.0
_SECONDS_TO_GREET = 10.0
_MOST_GREETING = 512  # connections before the end of their handshake, with a thread each
_SECONDS_OF_SILENCE = 300.0  # after which the other side counts as gone


class Refused(Exception):
    """A request that cannot be served; the text says why."""


class MemoryServer(socketserver.ThreadingTCPServer):
    """Serves a folder until it is shut down.

    Args:
        folder: folder of the files; created if missing, private to this user.
        host: address to listen on, by which other hosts reach this one.
        secret: the job's secret.
        silence: seconds after which an idle connection is closed.
        port: port to listen on; any free one if 0.

    Raises:
        OSError: the folder cannot be created or is open to other users, another memory server serves it, or the port is
            in use.
    """

    daemon_threads = True
    allow_reuse_address = allow_reuse_port = True  # even if the process that starts memory servers reserves the port
    request_queue_size = 1024

    def __init__(
        self, folder: Path, host: str, secret: str, silence: float = _SECONDS_OF_SILENCE, *, port: int = 0
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(folder)
        self.folder = folder
        self.secret = secret
        self.silence = silence
        self._greeting: dict[Any, str] = {}  # connections in their handshake, and the address of each
        self._greeting_lock = threading.Lock()
        self._lock = _locked(folder / ".lock")
        shutil.rmtree(folder / _PARTIAL, ignore_errors=True)
        (folder / _PARTIAL).mkdir()
        self.address_family = family_of(host)
        super().__init__((host, port), _Conversation)

    @property
    def address(self) -> str:
        """`host:port`, with an IPv6 host in brackets."""
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if self.address_family == socket.AF_INET6 else f"{host}:{port}"

    def path_of(self, name: object) -> Path:
        """Return the path of a file; raises Refused if the name is not valid."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Refused(f"{name!r} is not a file name")
        return self.folder / name

    def server_close(self) -> None:
        """See `socketserver`; also unlocks the folder."""
        super().server_close()
        os.close(self._lock)

    def process_request(self, request: Any, client_address: Any) -> None:
        """See `socketserver`. With too many unfinished handshakes, the oldest from the busiest address is dropped."""
        with self._greeting_lock:
            self._greeting[request] = client_address[0]
            if len(self._greeting) > _MOST_GREETING:
                busiest, _ = Counter(self._greeting.values()).most_common(1)[0]
                oldest = next(it for it, address in self._greeting.items() if address == busiest)
                del self._greeting[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends
        super().process_request(request, client_address)

    def greeted(self, request: Any) -> None:
        """Record that a connection's handshake has ended, successfully or not."""
        with self._greeting_lock:
            self._greeting.pop(request, None)

    def close_request(self, request: Any) -> None:
        """See `socketserver`."""
        self.greeted(request)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a connection that ends early just means that a rank died."""


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of an IP address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def proof(secret: str, side: str, nonces: tuple[str, str], port: int) -> str:
    """Return a side's proof of knowing the secret, for the nonces of the memory server and the client.

    The memory server's port is included, so that a stranger on another port cannot relay proofs to it.
    """
    return hmac.new(secret.encode(), "|".join((side, *nonces, str(port))).encode(), "sha256").hexdigest()


def _check_own(folder: Path) -> None:
    """Raise OSError if other users may have written, or can read, a folder; its name can be guessed."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} must be private to this user: use another one, or remove it (or chmod 700 it)")


def _locked(path: Path) -> int:
    """Lock a file, which the previous memory server may hold for a moment, and return its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _SECONDS_TO_LEAVE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise OSError(f"{path.parent} is used by another memory server; use another folder") from None
            time.sleep(0.05)


class _Conversation(socketserver.StreamRequestHandler):
    """One connection: a handshake, then requests until it is closed."""

    server: MemoryServer
    timeout = _SECONDS_TO_GREET
    disable_nagle_algorithm = True

    def handle(self) -> None:
        if not self._is_of_this_job():
            self._answer({"refused": "wrong secret for this job"})
            return
        self.server.greeted(self.connection)
        self.connection.settimeout(self.server.silence)
        actions: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "put": self._put,
            "get": self._get,
            "size": self._size,
            "list": self._list,
            "remove": self._remove,
        }
        while (line := self.rfile.readline(_MOST_LINE_BYTES)).endswith(b"\n"):
            request = json.loads(line)
            try:
                answer = actions[request["do"]](request)
            except (ConnectionError, TimeoutError):  # the next line would not be a request
                raise
            except (Refused, FileNotFoundError) as error:
                answer = {"refused": str(error), "missing": isinstance(error, FileNotFoundError)}
            except OSError as error:
                answer = {"refused": f"{type(error).__name__}: {error}"}
            if answer:
                self._answer(answer)

    def _is_of_this_job(self) -> bool:
        """Do the handshake: send a nonce, read the client's nonce and proof, and send the server's proof."""
        own = secrets.token_hex(16)
        self.wfile.write(f"{own}\n".encode())
        nonce, _, given = self.rfile.readline(MOST_GREETING_BYTES).decode("ascii", "replace").strip().partition(" ")
        port = self.server.server_address[1]
        expected = proof(self.server.secret, CLIENT, (own, nonce), port)
        if not hmac.compare_digest(given.encode(), expected.encode()):
            return False
        self._answer({"proof": proof(self.server.secret, SERVER, (own, nonce), port)})
        return True

    def _answer(self, answer: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(answer).encode() + b"\n")

    def _put(self, request: dict[str, Any]) -> dict[str, Any]:
        """Receive parts, each a line with its length and then its bytes; the file appears when it is complete."""
        partial = self.server.folder / _PARTIAL / uuid.uuid4().hex
        try:
            problem = self._receive(partial, int(request["bytes"]))
            target = self.server.path_of(request["name"])
            if problem is not None:
                raise problem
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
        return {"done": True}

    def _receive(self, path: Path, num_bytes: int) -> OSError | None:
        """Write all parts to a new file, and return an error only after all have been read, so that it can be sent.

        Full memory would also end ranks that share it, so the space for the whole file is reserved first.

        Raises:
            ConnectionError: parts are missing or invalid.
        """
        problem: OSError | None = None
        with contextlib.ExitStack() as opened:
            try:
                file: IO[bytes] = opened.enter_context(path.open("xb", buffering=0))
                _reserve(file, num_bytes, self.server.folder)
            except OSError as error:
                problem = error
            missing = num_bytes
            while (line := self.rfile.readline(32)) != END:
                left = int(line)
                if left <= 0:
                    raise ConnectionError(f"a part of {left} bytes")
                while left:
                    content = self.rfile.read1(min(left, 1 << 20))
                    if not content:
                        raise ConnectionError("the file ends early")
                    left -= len(content)
                    missing -= len(content)
                    problem = problem or _written(file, content)
        if missing:
            problem = problem or OSError(f"expected {num_bytes} bytes, got {num_bytes - missing}")
        return problem

    def _get(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send ranges of a file."""
        path = self.server.path_of(request["name"])
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            pieces = request["pieces"] if request["pieces"] is not None else [[0, size]]
            if any(min(start, length) < 0 or start + length > size for start, length in pieces):
                raise Refused(f"{request['name']} has {size} bytes, fewer than requested")
            self._answer({"bytes": sum(length for _, length in pieces)})
            for start, length in pieces:
                if length and self._send(file, start, length) != length:
                    raise ConnectionError("the file was truncated")
        return {}

    def _send(self, file: IO[bytes], start: int, length: int) -> int:
        try:
            return self.connection.sendfile(file, start, length)
        except OSError as error:  # the client would take an answer for the file
            raise ConnectionError(str(error)) from error

    def _size(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"bytes": self.server.path_of(request["name"]).stat().st_size}

    def _list(self, request: dict[str, Any]) -> dict[str, Any]:
        """List the files that have not changed for some seconds, with their sizes."""
        folder, newest = self.server.folder, time.time() - float(request["unchanged"])
        found = {}
        for parent, _, names in os.walk(folder):
            for name in names:
                path = Path(parent, name)
                relative = str(path.relative_to(folder))
                with contextlib.suppress(FileNotFoundError):  # removed concurrently
                    if _NAME.fullmatch(relative) and (status := path.stat()).st_mtime <= newest:
                        found[relative] = status.st_size
        return {"files": found}

    def _remove(self, request: dict[str, Any]) -> dict[str, Any]:
        """Remove files, and folders that become empty."""
        for name in request["names"]:
            path = self.server.path_of(name)
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                for parent in list(path.parents)[: name.count("/")]:
                    parent.rmdir()
        return {"done": True}


def _reserve(file: IO[bytes], num_bytes: int, folder: Path) -> None:
    """Reserve space for a new file, so that concurrent files do not share it; raise OSError if there is too little."""
    try:
        if num_bytes > shutil.disk_usage(folder).free:  # trying would fill it for a moment
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(folder).free
        text = f"no room for a file of {num_bytes:,} bytes: {free:,} are free in {folder}"
        raise OSError(errno.ENOSPC, text) from None


def _written(file: IO[bytes], content: bytes) -> OSError | None:
    """Write content; return the error instead of raising it, so that the rest can be read from the connection."""
    left = memoryview(content)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        return error
    return None


def main() -> None:
    """`server.py FOLDER HOST PORT`: prints its address, and serves until standard input ends.

    Each byte of input is echoed, to show that the process is alive.
    """
    folder, host, port = sys.argv[1:]
    server = MemoryServer(Path(folder), host, os.environ[SECRET], port=int(port))
    print(server.address, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.suppress(ConnectionError):
        while word := os.read(sys.stdin.fileno(), 1):
            os.write(sys.stdout.fileno(), word)


if __name__ == "__main__":
    main()
