"""The ranks of a run as seen from outside: processes below that which has started them. Linux only."""

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

    Those of an elastic run are the trainers. Of any other run they are the processes to which their parent has given
    all that a launcher gives to a rank: other programs may have a variable `RANK` as well.
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
            if _is_launched(pid, parent) and _name(pid) != SUPERVISOR_NAME  # whose trainer has ended, or is to come
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


def _is_launched(pid: int, parent: int) -> bool:
    """Whether the parent is a launcher that has started a process as a rank: ours, torchrun's agent, or Slurm's."""
    own, inherited = _variables(pid), _variables(parent)
    if LAUNCHER_PID in own:
        return own[LAUNCHER_PID] == str(parent)
    is_rank = own.keys() >= _OF_TORCHRUN or own.keys() >= _OF_SLURM
    return is_rank and "RANK" not in inherited and "SLURM_PROCID" not in inherited


def _rank(pid: int) -> int | None:
    """The rank that the process was started as; a fork shows that of its parent."""
    variables = _variables(pid)
    number = variables.get("RANK", variables.get("SLURM_PROCID", ""))
    return int(number) if number.isdigit() else None


def _variables(pid: int) -> dict[str, str]:
    """With which a process was started; none of one that has ended, or is another user's."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(it.split("=", 1) for it in content.split("\0") if "=" in it)
