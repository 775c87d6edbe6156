"""A run observed from outside: its ranks, found through /proc, and when each step appeared in its metrics."""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from nxd_cli.launch import LAUNCHER_PID

from nxd_elastic.supervisor import SUPERVISOR_NAME, TRAINER_NAME

_OF_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
_OF_SLURM = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"}


class RankProcess(NamedTuple):
    """A process that trains."""

    number: int  # rank number, from its launcher
    pid: int  # process id
    parent: int  # id of the parent process, which in an elastic run replaces it when it dies
    host: int  # process id of its launcher, which represents a host: torchrun's agent, or `nxd train --nproc`


def ranks_below(root: int) -> list[RankProcess]:
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
    return sorted(RankProcess(number, *processes) for number, *processes in found if number is not None)


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


METRICS_FILE = "metrics.jsonl"  # in a run's folder, with a line of JSON for each logged step


POLL_SECONDS = 0.01


class LoggedStep(NamedTuple):
    """The used fields of a line of a run's metrics."""

    step: int  # optimizer steps taken, from 1
    layout: str | None = None  # the layout, such as "TP 2 x DP 2"; in the first line of each invocation
    resumed_from: int | None = None  # step of the checkpoint; in the first line after a resume

    @classmethod
    def of_line(cls, line: str) -> Self:
        """Parse a line."""
        content = json.loads(line)
        return cls(content["step"], content.get("layout"), content.get("resumed_from"))


class Seen(NamedTuple):
    """A record and when it was seen, on the monotonic clock."""

    at: float
    record: LoggedStep


class HasEnded(Protocol):
    """A process, started here or elsewhere on this machine."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """The exit code; None while it runs."""


class FollowedRun:
    """Follows a run that trains.

    Args:
        process: the process that started the ranks, or their launchers.
        output: the run's folder.
        patience: seconds without a new step after which waiting raises TimeoutError; None waits forever.

    Attributes:
        seen: records in the order in which they came, including those of lost steps that were repeated; of earlier
            records only the newest.
    """

    def __init__(self, process: HasEnded, output: Path, *, patience: float | None = None) -> None:
        self.process = process
        self._patience, self._began = patience, time.monotonic()
        self.seen: list[Seen] = []
        self._file = output / METRICS_FILE
        self._lines: list[str] = []  # current lines of the file
        self._stands_at = (0, 0)  # inode, and number of bytes read
        self.poll()
        del self.seen[:-1]  # the times of the others are unknown

    def poll(self) -> Sequence[Seen]:
        """Read new lines of the metrics; returns the records."""
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return []
        inode, offset = self._stands_at
        is_another = status.st_ino != inode or status.st_size < offset
        if not is_another and status.st_size == offset:
            return []
        offset = 0 if is_another else offset
        with self._file.open("rb") as file:
            file.seek(offset)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        lines = content.decode().splitlines()
        self._stands_at = (status.st_ino, offset + len(content))
        fresh = lines
        if is_another:  # a resumed run keeps the steps before it
            kept = next((i for i, pair in enumerate(zip(lines, self._lines, strict=False)) if pair[0] != pair[1]), None)
            fresh = lines[min(len(lines), len(self._lines)) if kept is None else kept :]
            self._lines = []
        self._lines += lines
        now = time.monotonic()
        new = [Seen(now, LoggedStep.of_line(line)) for line in fresh]
        self.seen += new
        return new

    @property
    def step(self) -> int:
        """The step of the newest record; 0 before the first."""
        return self.seen[-1].record.step if self.seen else 0

    @property
    def generations(self) -> int:
        """How often the run has begun or resumed, and then taken a step."""
        return sum(it.record.layout is not None for it in self.seen)

    def ranks(self) -> list[RankProcess]:
        """The ranks that currently run."""
        return ranks_below(self.process.pid)

    def has_ended(self) -> bool:
        """Whether the process has ended; also reads new metrics."""
        ended = self.process.poll() is not None
        self.poll()
        newest = self.seen[-1].at if self.seen else self._began
        if not ended and self._patience is not None and time.monotonic() - newest > self._patience:
            raise TimeoutError(f"the run makes no progress: no step for {self._patience:g} s after step {self.step}")
        return ended

    def wait(self, seconds: float) -> bool:
        """Follow the run for some time, or until it ends; returns whether it continues."""
        until = time.monotonic() + seconds
        while not self.has_ended():
            left = until - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, POLL_SECONDS))
        return False

    def wait_for_step(self, step: int) -> bool:
        """Follow the run until a step is in its metrics, or it ends; returns whether it continues."""
        while self.step < step:
            if not self.wait(POLL_SECONDS):
                return False
        return True

    def wait_for_generation(self, number: int) -> bool:
        """Follow the run until it has resumed and taken a step, or ends; returns whether it continues."""
        while self.generations < number:
            if not self.wait(POLL_SECONDS):
                return False
        return True

    def step_seconds(self) -> float | None:
        """The median duration of a step between two others of a generation; None before there are two."""
        spans = [
            (after.at - before.at) / max(1, after.record.step - before.record.step)
            for before, after in zip(self.seen, self.seen[1:], strict=False)
            if after.record.layout is None
        ]
        return sorted(spans)[len(spans) // 2] if spans else None
