"""A staged data file in slices: the queue from the thread that copies to the one that writes, and the file's bytes.

A save that fits into the memory is one slice. A larger one alternates between two halves of it. This file does not
import torch, since the writer process needs it.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nxd_ckpt.checksums import BlockHasher

WRITE_BYTES = 2**20  # hashed and written at a time, while they are in the processor's cache


@dataclass(frozen=True, slots=True)
class Slice:
    """The next bytes of a data file's payload, at a place in the shared memory.

    Attributes:
        start: index of the first byte in the memory.
        num_bytes: number of bytes.
    """

    start: int
    num_bytes: int


class Stopped(Exception):
    """The other side of a queue has given up, and knows why."""


class SliceQueue:
    """Slices to write, at most `num_slots` of them filled and not yet written."""

    def __init__(self, num_slots: int) -> None:
        self._changed = threading.Condition()
        self._num_slots = num_slots
        self._filled: list[Slice] = []
        self._num_put = 0
        self._num_written = 0
        self._complete = False
        self._stopped = False
        self._error: Exception | None = None

    def wait_for_slot(self) -> int:
        """Wait for a slot that may be filled, and return its number.

        Raises:
            Stopped: nothing more will be written.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._num_put - self._num_written < self._num_slots)
            if self._stopped:
                raise Stopped
            return self._num_put % self._num_slots

    def put(self, filled: Slice) -> None:
        """Add a filled slot."""
        with self._changed:
            self._filled.append(filled)
            self._num_put += 1
            self._changed.notify_all()

    def complete(self) -> None:
        """Mark the last slice as added."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def stop(self, error: Exception | None = None) -> None:
        """Release the threads that wait here: all is written, or one side has given up."""
        with self._changed:
            self._stopped = True
            self._error = self._error or error
            self._changed.notify_all()

    def slices(self) -> Iterator[Slice]:
        """Yield the slices in order; asking for the next one marks the previous one as written.

        Raises:
            Stopped: the remaining slices will never come; or the error given to `stop`.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._filled or self._complete)
                if self._filled:
                    following = self._filled.pop(0)
                elif self._complete:
                    return
                else:
                    raise self._error or Stopped
            yield following
            with self._changed:
                self._num_written += 1
                self._changed.notify_all()

    def wait_until_stopped(self) -> None:
        """Wait until the memory is no longer in use."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped)


class ChunkHashes:
    """The block hashes of consecutive chunks, fed in parts of any size.

    Attributes:
        done: the hashes of each complete chunk.
    """

    def __init__(self, chunk_sizes: Iterable[int]) -> None:
        self.done: list[tuple[str, ...]] = []
        self._sizes = iter(chunk_sizes)
        self._begin_chunk()

    def update(self, part: memoryview) -> None:
        """Hash the next bytes."""
        while part:
            in_chunk = part[: self._left_in_chunk]
            self._hasher.update(in_chunk)
            self._left_in_chunk -= len(in_chunk)
            part = part[len(in_chunk) :]
            if not self._left_in_chunk:
                self.done.append(self._hasher.hashes())
                self._begin_chunk()

    def _begin_chunk(self) -> None:
        self._hasher = BlockHasher()
        self._left_in_chunk = next(self._sizes, 0)


def staged_parts(
    header: bytes, memory: memoryview, slices: Iterable[Slice], hashes: ChunkHashes
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a data file in order; each part is valid until the next is requested.

    Args:
        header: the first bytes of the file.
        memory: the shared memory that holds the slices.
        slices: the other bytes; the next slice is requested when the previous one is no longer needed.
        hashes: receives all bytes after the header.
    """
    yield header
    for filled in slices:
        end = filled.start + filled.num_bytes
        for start in range(filled.start, end, WRITE_BYTES):
            part = memory[start : min(start + WRITE_BYTES, end)]
            hashes.update(part)
            yield part
