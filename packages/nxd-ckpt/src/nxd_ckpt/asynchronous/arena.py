"""Memory that the writer process sees too: tensors are copied here, and are the caller's own again.

What goes where is decided in `staging.py`.
"""

import mmap
import os
import tempfile

import torch


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
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nxd-ckpt-arena", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
