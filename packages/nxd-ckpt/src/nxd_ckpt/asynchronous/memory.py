"""How much memory an arena may take when the caller does not say."""

import os


def default_limit(world_size: int, arena_bytes: int) -> int:
    """This rank's share of half the memory that is free now, in bytes, and no less than the arena has already.

    Ranks of a host share alike: as many as LOCAL_WORLD_SIZE says, which launchers set, else all, but no more than CPUs.
    """
    there = int(os.environ.get("LOCAL_WORLD_SIZE", min(world_size, os.cpu_count() or 1)))
    return max(arena_bytes, free_memory() // 2 // there)


def free_memory() -> int:
    """Bytes that this process could still take: of the machine or, if that is less, of its control group."""
    return min(_free_on_machine(), free_in_control_group())


def _free_on_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kibibytes = dict(line.split()[:2] for line in file)["MemAvailable:"]
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(kibibytes) * 1024


def free_in_control_group(folder: str = "/sys/fs/cgroup") -> int:
    """Bytes up to the limit of the control group (version 2) with this folder; very many if it has none."""
    try:
        limit, used = (_number_in(f"{folder}/{name}") for name in ("memory.max", "memory.current"))
        with open(f"{folder}/memory.stat", encoding="ascii") as file:
            reclaimable = int(dict(line.split() for line in file)["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 2**63  # no such group, or "max": no limit
    return max(0, limit - (used - reclaimable))


def _number_in(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read())
