"""xxh3 checksums of bytes, one per block, so that a part can be read and verified without the rest."""

from collections.abc import Iterable, Iterator

import xxhash

from nxd_ckpt.errors import CheckpointError

BLOCK_BYTES = 16 * 2**20


class BlockHasher:
    """Hashes bytes given in order, in parts of any size."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._state = xxhash.xxh3_64()
        self._left_in_block = BLOCK_BYTES

    def update(self, part: "bytes | memoryview") -> None:
        """Goes on with the next bytes."""
        rest = memoryview(part)
        while len(rest) >= self._left_in_block:
            self._state.update(rest[: self._left_in_block])
            rest = rest[self._left_in_block :]
            self._end_block()
        self._state.update(rest)
        self._left_in_block -= len(rest)

    def hashes(self) -> tuple[str, ...]:
        """The xxh3-64 of each block, of 16 hex digits; called once, at the end."""
        if self._left_in_block < BLOCK_BYTES:
            self._end_block()
        return tuple(self._done)

    def _end_block(self) -> None:
        self._done.append(self._state.hexdigest())
        self._state.reset()
        self._left_in_block = BLOCK_BYTES


def hashes_of(parts: "Iterable[bytes | memoryview]") -> tuple[str, ...]:
    """The hashes of bytes that come in these parts."""
    hasher = BlockHasher()
    for part in parts:
        hasher.update(part)
    return hasher.hashes()


class BlockCheck:
    """Compares one block of a file with its hash, in parts of any size that come in order.

    Args:
        offset: the block's first byte in the file, for messages.
        num_bytes: of the block.
        expected: its hash.
    """

    def __init__(self, offset: int, num_bytes: int, expected: str) -> None:
        self._offset = offset
        self._num_bytes = self._left = num_bytes
        self._expected = expected
        self._state = xxhash.xxh3_64()

    def update(self, part: memoryview) -> None:
        """Goes on with the next bytes.

        Raises:
            CheckpointError: they are the last ones, and the block is damaged.
        """
        self._state.update(part)
        self._left -= len(part)
        if not self._left and self._state.hexdigest() != self._expected:
            raise CheckpointError(
                f"{self._num_bytes} bytes from byte {self._offset} on do not match their checksum; use another "
                "checkpoint"
            )


def num_blocks(num_bytes: int) -> int:
    """How many hashes so many bytes have."""
    return -(-num_bytes // BLOCK_BYTES)


def blocks_with_hashes(num_bytes: int, hashes: tuple[str, ...]) -> Iterator[tuple[int, int, str]]:
    """First byte, end and hash of each block."""
    for number, expected in enumerate(hashes):
        yield number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, num_bytes), expected
