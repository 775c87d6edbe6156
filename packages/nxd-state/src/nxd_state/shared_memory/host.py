"""Which processes share a host, and whether one of them still lives."""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_Condition = Literal["runs", "is stopped", "has ended"]

# Where a store that is seen by another core implies that those before it are: the words that say "the data is there"
# are written by plain stores, since Python has no others.
_MACHINES = ("x86_64", "AMD64")


def host_identity() -> str | None:
    """The same text for two processes that can map each other's memory; None where no process can, or none shall.

    Raises:
        ValueError: `NXD_SHM` is neither 0 nor 1.
    """
    switch = os.environ.get("NXD_SHM", "1")
    if switch not in ("0", "1"):
        raise ValueError(f"NXD_SHM={switch!r} is not known; use 1 or 0: whether ranks of one host share memory")
    if switch == "0" or sys.platform != "linux" or platform.machine() not in _MACHINES:
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"
    except OSError:
        return None


@dataclass(frozen=True)
class Process:
    """A process of this host, told apart by its start from a later one of the same number."""

    pid: int
    start: int

    @classmethod
    def current(cls) -> "Process":
        """This process."""
        status = _status(os.getpid())
        assert status is not None  # we run
        return cls(os.getpid(), status[1])

    def condition(self) -> _Condition:
        """Its condition; a zombie, which has not been waited for yet, counts as ended."""
        status = _status(self.pid)
        if status is None or status[1] != self.start or status[0] in "ZXx":
            return "has ended"
        return "is stopped" if status[0] in "Tt" else "runs"


def _status(pid: int) -> tuple[str, int] | None:
    """State and start time of a process, see proc_pid_stat(5); None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name, in brackets, may hold anything
    return fields[0], int(fields[19])
