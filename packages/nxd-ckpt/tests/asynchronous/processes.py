"""What the system tells of processes and their memory, for tests that look at a writer from outside."""

import os
import select
from pathlib import Path

STAGING = "/memfd:nxd-ckpt-staging"


def writer_of(parent: int | None = None) -> int:
    """Process id of the one writer that this or another process has started."""
    (writer,) = children_of(parent or os.getpid())
    return writer


def children_of(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            process, _, rest = status.read_text().partition(" (")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent_there = rest.rpartition(") ")[2].split()[:2]
        if int(parent_there) == parent and state != "Z":
            found.append(int(process))
    return found


def staging_buffers() -> dict[str, int]:
    """Bytes of the staging buffers that this process has mapped, by inode."""
    sizes: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if STAGING in line:
            addresses, _, _, _, inode, *_ = line.split()
            start, end = (int(address, 16) for address in addresses.split("-"))
            sizes[inode] = sizes.get(inode, 0) + end - start
    return sizes


def open_files() -> list[str]:
    """What this process has open, as the system names it, without the numbers of sockets and pipes."""
    folder = Path("/proc/self/fd")
    links = [os.readlink(folder / fd) for fd in os.listdir(folder) if (folder / fd).is_symlink()]
    return sorted(link.partition(":[")[0] for link in links if not link.startswith("/proc/"))


def ends_within(process: int, seconds: float) -> bool:
    """Waits for a process that is not ours to be gone."""
    try:
        fd = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def wait_until_written(root: Path, writer: int) -> None:
    """Returns when a save at work in the root has some bytes of that writer's data file."""
    while not any(file.stat().st_size for file in root.glob(f".staging/*/data/*-{writer:05d}-0.safetensors")):
        pass
