"""xxh3 checksums, one per block of bytes, so that a part of a file can be verified without the rest."""

from collections.abc import Iterable, Iterator

import xxhash

from nxd_ckpt.errors import CheckpointError

BLOCK_BYTES = 16 * 2**20


class BlockHasher:
    """Hashes bytes in order, in parts of any size."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._state = xxhash.xxh3_64()
        self._left_in_block = BLOCK_BYTES

    def update(self, part: "bytes | memoryview") -> None:
        """Hash the next bytes."""
        rest = memoryview(part)
        while len(rest) >= self._left_in_block:
            self._state.update(rest[: self._left_in_block])
            rest = rest[self._left_in_block :]
            self._end_block()
        self._state.update(rest)
        self._left_in_block -= len(rest)

    def hashes(self) -> tuple[str, ...]:
        """Return the xxh3-64 of each block as 16 hex digits. Called once, at the end."""
        if self._left_in_block < BLOCK_BYTES:
            self._end_block()
        return tuple(self._done)

    def _end_block(self) -> None:
        self._done.append(self._state.hexdigest())
        self._state.reset()
        self._left_in_block = BLOCK_BYTES


def hashes_of(parts: "Iterable[bytes | memoryview]") -> tuple[str, ...]:
    """Return the block hashes of bytes given in parts."""
    hasher = BlockHasher()
    for part in parts:
        hasher.update(part)
    return hasher.hashes()


class BlockCheck:
    """Compares one block of a file with its hash; the bytes come in order, in parts of any size."""

    def __init__(self, offset: int, num_bytes: int, expected: str) -> None:
        self._offset = offset
        self._num_bytes = self._left = num_bytes
        self._expected = expected
        self._state = xxhash.xxh3_64()

    def update(self, part: memoryview) -> None:
        """Hash the next bytes, and compare the hash after the last ones.

        Raises:
            CheckpointError: the block is damaged.
        """
        self._state.update(part)
        self._left -= len(part)
        if not self._left and self._state.hexdigest() != self._expected:
            raise CheckpointError(f"{self._num_bytes} bytes from byte {self._offset} on do not match their checksum")


def num_blocks(num_bytes: int) -> int:
    """Return the number of blocks, and so of hashes, of a number of bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def blocks_with_hashes(num_bytes: int, hashes: tuple[str, ...]) -> Iterator[tuple[int, int, str]]:
    """Yield the first byte, end and hash of each block."""
    for number, expected in enumerate(hashes):
        yield number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, num_bytes), expected
