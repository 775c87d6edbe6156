"""The ranks of a run as seen from outside: descendants of the process that started them. Linux only."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nxd_cli.launch import LAUNCHER_PID

from nxd_elastic.supervisor import SUPERVISOR_NAME, TRAINER_NAME

_OF_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
_OF_SLURM = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"}


class Rank(NamedTuple):
    """A process that trains.

    Attributes:
        number: rank number, from its launcher.
        pid: process id.
        parent: id of the parent process, which in an elastic run replaces it when it dies.
        host: process id of its launcher, which represents a host: torchrun's agent, or `nxd train --nproc`.
    """

    number: int
    pid: int
    parent: int
    host: int


def ranks_below(root: int) -> list[Rank]:
    """Return the ranks of the run that a process has started, by number.

    In an elastic run these are the trainers. In any other run they are processes whose parent has set all variables
    that a launcher sets for a rank; other programs may have a variable `RANK` as well.
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
            if _is_launched(pid, parent) and _name(pid) != SUPERVISOR_NAME  # its trainer has ended, or is to start
        ]
    return sorted(Rank(number, *processes) for number, *processes in found if number is not None)


def kill_host(host: int) -> None:
    """Kill a launcher and everything that it has started at once, like a power failure."""
    for pid in [host, *[pid for _, pid in _below(host)]]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> Iterator[tuple[int, int]]:
    """Yield all descendants as (parent, process), parents first."""
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


def _is_launched(pid: int, parent: int) -> bool:
    """Whether the parent is a launcher (ours, torchrun's agent, or Slurm's) that started the process as a rank."""
    own, inherited = _variables(pid), _variables(parent)
    if LAUNCHER_PID in own:
        return own[LAUNCHER_PID] == str(parent)
    is_rank = own.keys() >= _OF_TORCHRUN or own.keys() >= _OF_SLURM
    return is_rank and "RANK" not in inherited and "SLURM_PROCID" not in inherited


def _rank(pid: int) -> int | None:
    """Return the rank that the process was started as; a fork has its parent's."""
    variables = _variables(pid)
    number = variables.get("RANK", variables.get("SLURM_PROCID", ""))
    return int(number) if number.isdigit() else None


def _variables(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it has ended, or belongs to another user."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(it.split("=", 1) for it in content.split("\0") if "=" in it)
