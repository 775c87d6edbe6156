"""Copies tensors to memory shared with the writer process; afterwards the caller may change them.

Tensors are copied in the order of the data file: in the call, whole or slice by slice, or in the background. Here are
also the shared memory itself and its size limit.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from nxd_ckpt.asynchronous.handle import saves_in_progress
from nxd_ckpt.asynchronous.slices import Slice, SliceQueue
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import hold_standard_streams
from nxd_ckpt.tensor_bytes import pieces_of

_COPIED_AT_ONCE = 2**20  # bytes: counters and statistics, which a forward pass may change


class SharedBuffer:
    """Memory shared with another process through a file descriptor. It grows when needed, and never shrinks.

    The memory has no name, so it is freed when the last process that has it open ends, however that ends.

    Attributes:
        fd: the file descriptor for the other process.
        view: the bytes.
        memory: the same bytes as a tensor, `uint8[size]`.
    """

    def __init__(self) -> None:
        self.fd = _nameless_file()
        self.view = memoryview(b"")
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> None:
        """Make the memory at least this large; its contents may be lost.

        Raises:
            OSError: there is not enough memory.
        """
        if num_bytes > self.memory.nbytes:
            os.ftruncate(self.fd, num_bytes)
            self.view = memoryview(mmap.mmap(self.fd, num_bytes))
            self.memory = torch.frombuffer(self.view, dtype=torch.uint8)

    def close(self) -> None:
        """Free the memory."""
        self.view = memoryview(b"")
        self.memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


def _nameless_file() -> int:
    hold_standard_streams()
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nxd-ckpt-staging", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def default_limit(world_size: int, buffer_bytes: int) -> int:
    """Return this rank's share of half the free memory, in bytes; at least the size of its buffer.

    The ranks of a host have equal shares. Their number is LOCAL_WORLD_SIZE, which launchers set; otherwise all ranks,
    but at most the number of CPUs.
    """
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", min(world_size, os.cpu_count() or 1)))
    return max(buffer_bytes, free_memory() // 2 // local_world_size)


def free_memory() -> int:
    """Return the bytes that this process can still take: of the machine, or of its control group if that has less."""
    return min(_free_on_machine(), free_in_control_group())


def _free_on_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kibibytes = dict(line.split()[:2] for line in file)["MemAvailable:"]
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(kibibytes) * 1024


def free_in_control_group(folder: str = "/sys/fs/cgroup") -> int:
    """Return the bytes left to the limit of a control group (version 2); 2**63 if it has no limit."""
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


def stage(tensors: Iterable[torch.Tensor], memory: torch.Tensor, slot_bytes: int, queue: SliceQueue) -> None:
    """Copy the tensors' elements one after another into slots, and queue each slot when it is full.

    Args:
        tensors: tensors of any strides and devices; larger element sizes first, so that each is aligned in its slot.
        memory: the shared memory, `uint8[at least num_slots * slot_bytes]`.
        slot_bytes: the size of a slot, a multiple of 64.
        queue: the queue that provides slots and receives the filled ones.

    Raises:
        Stopped: nothing more will be written.
    """
    start, used = queue.wait_for_slot() * slot_bytes, 0
    for tensor in tensors:
        for piece in pieces_of(_sliceable(tensor), slot_bytes):
            if used + piece.nbytes > slot_bytes:
                queue.put(Slice(start, used))
                start, used = queue.wait_for_slot() * slot_bytes, 0
            target = memory[start + used : start + used + piece.nbytes]
            target.view(piece.dtype).view(piece.shape).copy_(piece)
            used += piece.nbytes
    queue.put(Slice(start, used))
    queue.complete()


def _sliceable(tensor: torch.Tensor) -> torch.Tensor:
    """Copy tensors of an XLA device to the CPU as a whole: cutting them there would compile a graph per piece."""
    tensor = tensor.detach()
    accelerator = torch.accelerator.current_accelerator()  # whose memory can be copied in pieces
    is_cut_where_it_is = tensor.is_cpu or (accelerator is not None and tensor.device.type == accelerator.type)
    return tensor if is_cut_where_it_is else tensor.cpu()


class DeferredCopies:
    """Copies of one save's tensors that are made in the background, during the next forward and backward passes.

    Small tensors, and those outside of CPU memory, are copied when it is made; `finish` copies the others. Until then
    they must not change, and the steps of torch's optimizers wait.

    Args:
        names: the names of the tensors, for messages.
        tensors: the tensors to save, in the order of the data file.
        memory: the shared memory, `uint8[at least the bytes of all tensors]`.
        queue: the queue that receives all bytes as one slice; it has one slot.

    Raises:
        Stopped: nothing will be written.
    """

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], memory: torch.Tensor, queue: SliceQueue
    ) -> None:
        queue.wait_for_slot()
        self._queue = queue
        self._left: list[tuple[str, torch.Tensor, torch.Tensor, int]] = []  # with the place and the version
        self._num_bytes = 0
        for name, tensor in zip(names, tensors, strict=True):
            place = memory[self._num_bytes : self._num_bytes + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._num_bytes += tensor.nbytes
            if tensor.nbytes <= _COPIED_AT_ONCE or not tensor.is_cpu or tensor.is_inference():
                place.copy_(tensor.detach())
            else:
                self._left.append((name, tensor.detach(), place, tensor._version))

    def finish(self) -> None:
        """Copy the remaining tensors, and queue all bytes.

        Raises:
            CheckpointError: a tensor has changed in the meantime.
        """
        for name, tensor, place, version in self._left:
            place.copy_(tensor)
            if tensor._version != version:
                raise CheckpointError(
                    f"{name!r} has changed before it was copied; call wait_until_staged() on the result of async_save "
                    "before you change tensors, or save with copy_in_background=False"
                )
        self._queue.put(Slice(0, self._num_bytes))
        self._queue.complete()


_hooks: list[RemovableHandle] = []  # at most one


def hold_optimizers() -> None:
    """Make each step of torch's optimizers wait until all saves are staged."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(lambda *_: _wait_until_staged()))


def release_optimizers() -> None:
    """Undo `hold_optimizers`."""
    while _hooks:
        _hooks.pop().remove()


def _wait_until_staged() -> None:
    for save in saves_in_progress():
        save.wait_until_staged()
