"""Whether another process of this machine still runs: nobody need wait until a deadline for one that died."""

import os
from typing import NamedTuple


class Life(NamedTuple):
    """One process: the machine and namespace in which its number means something, the number, and when it began."""

    place: str
    pid: int
    began: str


def own_life() -> Life | None:
    """That of this process; None where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return Life(f"{boot}/{namespace}", os.getpid(), _state_and_beginning(os.getpid())[1])
    except OSError:
        return None


def has_ended(life: Life | None, observer: Life | None) -> bool:
    """Whether `observer`, the process that asks, can tell that this one has ended; False where it cannot."""
    if life is None or observer is None or life.place != observer.place:
        return False
    try:
        state, began = _state_and_beginning(life.pid)
    except FileNotFoundError:
        return not _takes_signals(life.pid)  # it may only be hidden
    except OSError:
        return False
    return state in "ZX" or began != life.began


def _state_and_beginning(pid: int) -> tuple[str, str]:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], fields[19]


def _takes_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
