"""Makes a data file from slices of the arena: yields its bytes in order, and hashes its chunks on the way."""

from collections.abc import Iterable, Iterator

from nxd_ckpt.asynchronous.handover import Slice
from nxd_ckpt.checksums import BlockHasher

PART_BYTES = 2**20  # hashed and written in one go, while it is in the processor's cache


class ChunkHashes:
    """The block hashes of chunks that lie one behind the other, whatever the parts in which their bytes come."""

    def __init__(self, chunk_sizes: Iterable[int]) -> None:
        self.done: list[tuple[str, ...]] = []
        self._sizes = iter(chunk_sizes)
        self._begin_chunk()

    def update(self, part: memoryview) -> None:
        """Goes on with the next bytes."""
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
    header: bytes, arena: memoryview, slices: Iterable[Slice], hashes: ChunkHashes
) -> Iterator[bytes | memoryview]:
    """The bytes of a data file, each part valid until the next is asked for.

    Args:
        header: its first bytes.
        arena: where the slices lie.
        slices: its other bytes; the next is asked for when the one before is no longer needed.
        hashes: takes the other bytes as they go by.
    """
    yield header
    for filled in slices:
        end = filled.start + filled.num_bytes
        for start in range(filled.start, end, PART_BYTES):
            part = arena[start : min(start + PART_BYTES, end)]
            hashes.update(part)
            yield part
