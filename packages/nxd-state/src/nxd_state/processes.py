"""Processes of this machine: which one it is, whether it still runs, dying with its parent, its streams.

Identities need Linux's /proc. nxd-ckpt, which imports no other package, and `nxd_cli.launch`, whose ranks must watch
for their launcher's death before they spend seconds on importing torch, have a `prctl` of their own.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PR_SET_PDEATHSIG = 1  # of prctl(2)


class Process(NamedTuple):
    """A process; the start time distinguishes it from a later one with the same pid.

    Attributes:
        host: the machine since its boot, and the namespace of process ids.
        pid: the process id.
        start: when the process started, in clock ticks since the boot.
    """

    host: str
    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process of this machine that has this pid now.

        Raises:
            OSError: there is no such process.
        """
        return cls(pid_namespace(), pid, _state_and_start(pid)[1])

    @classmethod
    def from_json(cls, content: Any) -> "Process":
        """The process that a list of the attributes describes; raises ValueError or TypeError for anything else."""
        host, pid, start = content
        if not isinstance(host, str) or {type(pid), type(start)} != {int}:
            raise ValueError("a process is described by a host, a process id and a start time")
        return cls(host, pid, start)

    def condition(self) -> Literal["runs", "is stopped", "has ended"]:
        """The condition of a process of this machine; a zombie counts as ended."""
        try:
            state, start = _state_and_start(self.pid)
        except OSError:
            return "has ended"
        if start != self.start or state in "ZXx":
            return "has ended"
        return "is stopped" if state in "Tt" else "runs"

    def has_ended(self, observer: "Process") -> bool:
        """Whether it is known to `observer`, this process, to have ended; False for a process of another machine."""
        return self.host == observer.host and self.condition() == "has ended"


def pid_namespace() -> str:
    """The machine since its boot, and the namespace in which process ids are valid."""
    return f"{_BOOT_ID.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


def _state_and_start(pid: int) -> tuple[str, int]:
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # see proc_pid_stat(5)
    fields = text.rpartition(")")[2].split()  # the name, in parentheses, may contain anything
    return fields[0], int(fields[19])


def set_parent_death_signal(number: int) -> None:
    """On Linux, have the kernel send this signal to this process when the thread that forked it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends; the thread that forked it must be the parent's main thread."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(128 + signal.SIGKILL)


def hold_standard_streams() -> None:
    """Open the null device for those of descriptors 0 to 2 that are closed.

    Otherwise the next file, socket or shared memory that is opened becomes standard input, output or error: a child
    process replaces it by its own, and libraries print into it. nxd-ckpt, which imports no other package, has the same
    in its `files.py`.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            if opened > 2:  # another thread was faster
                os.close(opened)
            else:
                os.set_inheritable(opened, True)
