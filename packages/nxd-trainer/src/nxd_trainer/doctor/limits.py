"""Limits of the process and the host that a job of many ranks runs into: open files, shared memory."""

import resource
import shutil
from pathlib import Path

from nxd_trainer.doctor.finding import Finding, ok, warning, wrong

FEWEST_FILES, ENOUGH_FILES = 1024, 4096
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY, ENOUGH_SHARED_MEMORY = 64 << 20, 1 << 30


def open_files_limits() -> tuple[int, int]:
    """How many files this process may have open: now, and at most if it asks."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def check_open_files(soft: int, hard: int) -> Finding:
    """Whether ranks, data loaders and checkpoints can open their files; connections between ranks count as well."""
    name = "open files"
    found = f"{_count(soft)} (hard limit {_count(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return ok(name, found)
    mend = f"ulimit -n {ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)}, before the job starts"
    if soft < FEWEST_FILES:
        return wrong(name, found, mend)
    return warning(name, f"{found}; jobs of hundreds of ranks want {ENOUGH_FILES}", mend)


def free_shared_memory() -> int | None:
    """Bytes free in the host's shared memory; None where there is no such place."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None


def check_shared_memory(free: int | None) -> Finding:
    """Whether data loaders and ranks of one host can hand tensors over; containers get 64 MiB unless told otherwise."""
    name = "shared memory"
    if free is None:
        return warning(name, f"there is no {SHARED_MEMORY}", "mount it (tmpfs), or use num_workers=0 in data loaders")
    found = f"{free / (1 << 20):.0f} MiB free in {SHARED_MEMORY}"
    mend = "start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory), or empty it"
    if free < LEAST_SHARED_MEMORY:
        return wrong(name, found, mend)
    if free < ENOUGH_SHARED_MEMORY:
        return warning(name, found, mend)
    return ok(name, found)


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
