"""The ranks of a run as seen from outside: processes below that which has started them. Linux only."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nxd_trainer.elastic.supervisor import SUPERVISOR_NAME, TRAINER_NAME


class Rank(NamedTuple):
    """A process that trains.

    Attributes:
        number: the rank that its launcher gave it.
        pid: of the process.
        parent: of its parent, which in an elastic run starts another one when it dies.
        host: pid of its launcher, which stands for a host: torchrun's agent, or `nxd train --nproc`.
    """

    number: int
    pid: int
    parent: int
    host: int


def ranks_below(root: int) -> list[Rank]:
    """The ranks of the run that a process has started, by number.

    Those of an elastic run are the trainers. Of any other run they are the processes that have the variable `RANK`,
    and whose parents have it not.
    """
    below = list(_below(root))
    trainers = [(supervisor, pid) for supervisor, pid in below if _name(pid) == TRAINER_NAME]
    if trainers:
        parents = {pid: parent for parent, pid in below}
        found = [(_rank(pid), pid, supervisor, parents.get(supervisor, root)) for supervisor, pid in trainers]
    else:
        found = [
            (_rank(pid), pid, parent, parent)
            for parent, pid in below
            if _rank(parent) is None and _name(pid) != SUPERVISOR_NAME  # whose trainer has ended, or is to come
        ]
    return sorted(Rank(number, *processes) for number, *processes in found if number is not None)


def kill_host(host: int) -> None:
    """End a launcher and all that it has started at once, as when a machine loses its power."""
    for pid in [host, *[pid for _, pid in _below(host)]]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> Iterator[tuple[int, int]]:
    """All descendants as (parent, process), parents first."""
    for child in _children(pid):
        yield pid, child
        yield from _below(child)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _rank(pid: int) -> int | None:
    """`RANK` as the process was started with; a fork shows that of its parent."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(it[5:]) for it in variables if it.startswith(b"RANK=") and it[5:].isdigit()), None)
