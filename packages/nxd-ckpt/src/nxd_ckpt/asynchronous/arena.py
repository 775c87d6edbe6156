"""Memory shared with the writer process: its size limit, and the copying of tensors into it.

After the copy the caller may change the tensors. Copies are in the order of the data file, whole or slice by slice.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable

import torch

from nxd_ckpt.asynchronous.handover import Handover, Slice
from nxd_ckpt.files import hold_standard_streams
from nxd_ckpt.tensor_bytes import pieces_of


class Arena:
    """Bytes shared with another process through a file descriptor. It grows and is reused, and it never shrinks.

    The memory has no name anywhere, so it is gone with the last process that has it open, however that one ends.

    Attributes:
        fd: file descriptor for the other process.
        memory: the bytes as a tensor, `uint8[size]`.
        view: the same bytes.
    """

    def __init__(self) -> None:
        self.fd = _nameless_file()
        self.view = memoryview(b"")
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> None:
        """Makes `memory` at least that large; what it held may be gone.

        Raises:
            OSError: there is not that much.
        """
        if num_bytes > self.memory.nbytes:
            os.ftruncate(self.fd, num_bytes)
            self.view = memoryview(mmap.mmap(self.fd, num_bytes))
            self.memory = torch.frombuffer(self.view, dtype=torch.uint8)

    def close(self) -> None:
        """Gives the memory back."""
        self.view = memoryview(b"")
        self.memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


def _nameless_file() -> int:
    hold_standard_streams()
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nxd-ckpt-arena", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


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


def stage(tensors: Iterable[torch.Tensor], memory: torch.Tensor, slot_bytes: int, handover: Handover) -> None:
    """Fills slots with the tensors' elements, one tensor behind the other, and hands each slot over.

    Args:
        tensors: of any strides and devices; larger element sizes first, so that each is aligned where it comes to lie.
        memory: the arena, `uint8[at least num_slots * slot_bytes]`.
        slot_bytes: size of a slot, a multiple of 64.
        handover: where to, and when a slot is free.

    Raises:
        Stopped: nothing more is going to be written.
    """
    start, used = handover.wait_for_slot() * slot_bytes, 0
    for tensor in tensors:
        for piece in pieces_of(_where_it_can_be_cut(tensor), slot_bytes):
            if used + piece.nbytes > slot_bytes:
                handover.put(Slice(start, used))
                start, used = handover.wait_for_slot() * slot_bytes, 0
            target = memory[start + used : start + used + piece.nbytes]
            target.view(piece.dtype).view(piece.shape).copy_(piece)
            used += piece.nbytes
    handover.put(Slice(start, used))
    handover.complete()


def _where_it_can_be_cut(tensor: torch.Tensor) -> torch.Tensor:
    """Cutting up a tensor of an XLA device would compile a graph per piece, so those come to the CPU as a whole."""
    tensor = tensor.detach()
    accelerator = torch.accelerator.current_accelerator()  # which has memory to copy pieces of
    is_cut_where_it_is = tensor.is_cpu or (accelerator is not None and tensor.device.type == accelerator.type)
    return tensor if is_cut_where_it_is else tensor.cpu()
