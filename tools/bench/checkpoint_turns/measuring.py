"""What one turn takes: wall time, processor time and memory, also of the processes that it has started. Linux only."""

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from checkpoint_turns.turn import Turn
from checkpoint_turns.variants import INCREMENTAL, Variant, bytes_of_data, changed_bytes_of_all, finish


class Measurement(NamedTuple):
    """One turn.

    Attributes:
        wall: seconds until the call has returned.
        cpu: processor seconds until all that it began is over.
        memory: bytes beyond what was held before.
        written: bytes of data files over bytes that had changed, of an incremental save; else 0.
    """

    wall: float
    cpu: float
    memory: int
    written: float


def measure(turn: Turn, variant: Variant) -> Measurement:
    """One turn of one rank, all ranks together."""
    if turn.rank == 0:
        place = turn.place(variant.folder)
        if variant.saves:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        elif variant.cold:
            _drop_pages(place)
    dist.barrier()
    if variant.prepare is not None:
        variant.prepare(turn)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    before = _resident("VmRSS")
    dist.barrier()
    start, cpu = time.perf_counter(), _cpu_seconds()
    variant.run(turn)
    wall = time.perf_counter() - start
    finish(turn)
    cpu = _cpu_seconds() - cpu
    dist.barrier()
    memory = _resident("VmHWM") - before + _memory_of_children()
    written = bytes_of_data(turn, "t") / changed_bytes_of_all(turn) if variant in INCREMENTAL else 0.0
    return Measurement(wall, cpu, memory, written)


def of_ranks(measured: Sequence[Measurement]) -> Measurement:
    """The slowest rank's time, all ranks' processor time, and the largest memory."""
    return Measurement(
        max(one.wall for one in measured),
        sum(one.cpu for one in measured),
        max(one.memory for one in measured),
        measured[0].written,
    )


def _drop_pages(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory can be measured on Linux only")


def _cpu_seconds() -> float:
    """Processor time of this process and of those that it has started."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    ticks = sum(sum(map(int, status[13:15])) for status in _status_of_children().values())
    return used.ru_utime + used.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def _memory_of_children() -> int:
    """Bytes that only they have; not the memory they share with this process, which counts here."""
    total = 0
    for child in _status_of_children():
        with contextlib.suppress(OSError):  # it may be ending
            for line in Path(f"/proc/{child}/smaps_rollup").read_text().splitlines():
                if line.startswith("Anonymous:"):
                    total += int(line.split()[1]) * 1024
    return total


def _status_of_children() -> dict[int, list[str]]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            status = path.read_text().replace(") ", "\t").replace(" (", "\t").replace(" ", "\t").split("\t")
            if status[3] == str(os.getpid()):
                found[int(status[0])] = status
    return found
