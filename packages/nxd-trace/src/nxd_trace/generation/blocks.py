"""Which blocks of the cache hold what: blocks of equal beginnings are shared, and kept until their place is needed."""

import hashlib
from array import array
from collections.abc import Iterable, Sequence


class BlockPool:
    """The blocks of a cache, and which of them hold the beginning of which text.

    A full block is known by the digest of all tokens up to its end. Blocks that no sequence uses are taken again in the
    order in which they were given back; until then another sequence that begins alike may use them as they are.

    Args:
        num_blocks: number of blocks in the cache; block 0, for padding, is never allocated.
    """

    def __init__(self, num_blocks: int) -> None:
        self._users = [0] * num_blocks
        self._unused = dict.fromkeys(range(1, num_blocks))  # the one to take next comes first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def share(self, digests: Iterable[bytes]) -> list[int]:
        """Take the blocks that hold the longest known beginning of a text, given by the digests of its full blocks."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            self._unused.pop(block, None)
            self._users[block] += 1
            blocks.append(block)
        return blocks

    def take(self, number: int) -> list[int]:
        """Take this many blocks, whose contents are forgotten; the caller knows that there are enough."""
        blocks = [block for block, _ in zip(self._unused, range(number), strict=False)]
        assert len(blocks) == number
        for block in blocks:
            del self._unused[block]
            self._users[block] = 1
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
        return blocks

    def keep(self, block: int, digest: bytes) -> None:
        """Note what a full block holds, unless another one holds the same."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def give_back(self, blocks: Sequence[int]) -> None:
        """A sequence no longer uses its blocks, listed in its order: later ones, of less use to others, go first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._unused[block] = None


class TextDigests:
    """The digests of a growing text's full blocks, each of all tokens up to its end.

    Args:
        tokens: the list itself, which grows.
        block_size: tokens in a block.
        salt: texts with different salts have different digests, and so share no blocks.
    """

    def __init__(self, tokens: Sequence[int], block_size: int, salt: bytes = b"") -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._salt = salt
        self._known: list[bytes] = []

    def first(self, num_tokens: int) -> list[bytes]:
        """Of the blocks that this many tokens fill."""
        number = num_tokens // self._block_size
        for index in range(len(self._known), number):
            before = self._known[-1] if index else self._salt
            start = index * self._block_size
            block = array("q", self._tokens[start : start + self._block_size])
            self._known.append(hashlib.sha256(before + block.tobytes()).digest())
        return self._known[:number]
