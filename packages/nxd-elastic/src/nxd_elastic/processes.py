"""Processes of this machine: which one it is, whether it has ended, and ending with another one. Linux only."""

import ctypes
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # of prctl(2)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Process(NamedTuple):
    """A process, told apart from a later one of the same number.

    Attributes:
        place: the machine since its start, and the namespace in which the number means something.
        pid: its number.
        start: when it began, in clock ticks since the machine did.
    """

    place: str
    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process of that number, here.

        Raises:
            OSError: there is none.
        """
        namespace = os.readlink("/proc/self/ns/pid")
        return cls(f"{_BOOT_ID.read_text().strip()}/{namespace}", pid, _state_and_start(pid)[1])

    @classmethod
    def from_json(cls, content: Any) -> "Process":
        """Of a list of its attributes; raises ValueError or TypeError for anything else."""
        place, pid, start = content
        if not isinstance(place, str) or {type(pid), type(start)} != {int}:
            raise ValueError("a process has a place, a number and a start")
        return cls(place, pid, start)

    def has_ended(self, observer: "Process") -> bool:
        """Whether `observer`, this process, can tell that it has; False for a process of another machine."""
        if self.place != observer.place:
            return False
        try:
            state, start = _state_and_start(self.pid)
        except OSError:
            return True
        return state in "ZXx" or start != self.start


def end_with(parent: int) -> None:
    """Have this process killed as soon as its parent ends; the thread that forked it must be the parent's main one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(128 + signal.SIGKILL)


def name_this_process(name: str) -> None:
    """Set the name that `ps` and /proc/PID/comm show, of 15 bytes at most."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def _state_and_start(pid: int) -> tuple[str, int]:
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()  # proc_pid_stat(5)
    return fields[0], int(fields[19])
