"""Every system call by which a process changes files: counted, logged, and made to fail or to be the last one.

The calls are caught where Python makes them, in the module `os`. That this misses none is shown by strace, see
`test_system_calls.py`.
"""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

WRITES = ["write", "writev", "pwrite", "pwritev"]
ON_DESCRIPTORS = [*WRITES, "fsync", "fdatasync", "ftruncate", "posix_fallocate", "fchmod"]
ON_PATHS = ["mkdir", "rmdir", "unlink", "remove", "truncate", "chmod", "symlink", "mknod"]
ON_TWO_PATHS = ["rename", "replace", "link"]
CREATING_FLAGS = os.O_CREAT | os.O_TRUNC
NOT_IN_A_FOLDER = ("/dev/", "pipe:", "socket:", "anon_inode:", "/memfd:")


@dataclass(frozen=True)
class Call:
    """One call: its name, the file or folder, for a rename where to, for a write the bytes, and whether it failed."""

    rank: int
    name: str
    path: str
    target: str = ""
    data: bytes = b""
    failed: bool = False


@dataclass(frozen=True)
class Sabotage:
    """What happens at the calls of these numbers: "before", "halfway" and "after" kill the process; "stop" stops it
    until somebody wakes it; "skip" does nothing instead of the call; a number is the errno that it fails with.
    """

    points: frozenset[int]
    how: str | int


class SystemCalls:
    """Takes hold of this process for good; meant for forked ones."""

    def __init__(self, rank: int, log: Path, sabotage: Sabotage | None, only: tuple[str, ...] = ()) -> None:
        self._rank = rank
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._sabotage = sabotage
        self._only = only
        self._count = 0
        self._original = {name: getattr(os, name) for name in ["open", *ON_DESCRIPTORS, *ON_PATHS, *ON_TWO_PATHS]}
        for name, original in self._original.items():
            setattr(os, name, self._wrapped(name, original))

    def _wrapped(self, name, original):
        def call(*args, **kwargs):
            described = self._describe(name, args, kwargs)
            if described is None or (self._only and name not in self._only):
                return original(*args, **kwargs)
            number, sabotage = self._count, self._sabotage
            self._count += 1
            how = sabotage.how if sabotage and number in sabotage.points else None
            if how == "before":
                self._die()
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "skip":
                return None
            if how == "halfway" and name in WRITES:
                self._original["write"](args[0], bytes(memoryview(args[1]).cast("B"))[: described["size"] // 2])
                self._die()
            if isinstance(how, int):
                raise OSError(how, os.strerror(how))
            try:
                result = original(*args, **kwargs)
            except OSError:
                self._note(described | {"failed": True})
                if how == "after":
                    self._die()
                raise
            if name == "write":
                described["data"] = bytes(memoryview(args[1]).cast("B"))[:result].hex()
            self._note(described)
            if how in ("after", "halfway"):
                self._die()
            return result

        return call

    def _note(self, described):
        described.pop("size", None)
        self._original["write"](self._log, (json.dumps(described) + "\n").encode())

    def _describe(self, name, args, kwargs):
        """The call as it goes into the log; None if it changes no file."""
        if name == "open" and not (args[1] if len(args) > 1 else kwargs["flags"]) & CREATING_FLAGS:
            return None
        if name in ON_DESCRIPTORS:
            path = os.readlink(f"/proc/self/fd/{args[0]}")
            if path.startswith(NOT_IN_A_FOLDER):
                return None
        else:
            path = _absolute(args[0], kwargs.get("dir_fd", kwargs.get("src_dir_fd")))
        described = {"rank": self._rank, "name": name, "path": path}
        if name in ON_TWO_PATHS:
            described["target"] = _absolute(args[1], kwargs.get("dst_dir_fd"))
        if name in WRITES:
            described["size"] = len(bytes(memoryview(args[1]).cast("B"))) if name == "write" else 0
        return described

    @staticmethod
    def _die():
        os.kill(os.getpid(), signal.SIGKILL)


def calls_in(log: Path) -> list[Call]:
    """What all ranks did, in order."""
    if not log.exists():
        return []
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return [Call(**{**entry, "data": bytes.fromhex(entry.get("data", ""))}) for entry in entries]


def text_of(error: int) -> str:
    return f"[Errno {error}] {os.strerror(error)}"


def _absolute(path, folder):
    path = os.fsdecode(path)
    if folder is not None and not os.path.isabs(path):
        path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
    return os.path.abspath(path)
