"""The key-value cache of a rank's attention heads: blocks of fixed shape, written in place, which sequences may share.

A sequence's block table lists its blocks in order, so a token's position says where its keys and values lie. The
position of a query alone decides which of them it may attend to: those up to its own. Padding has the last position,
which no attended token ever needs, in block 0 where the table has no other.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nxd_state import Group, all_gather
from torch import Tensor, nn

_SEQUENCE_DIM = 2  # of new keys and values


@dataclass(frozen=True)
class CacheLayer:
    """The cache entries of one attention layer per token, on this rank.

    Attributes:
        heads: key and value heads of this rank.
        key_size: length of each key.
        value_size: length of each value.
        dtype: dtype of both.
    """

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype


class KeyValueCache(nn.Module):
    """Buffers `keys_<layer>` and `values_<layer>` of all layers, `[heads/tp, blocks, block_size, size]`.

    Heads come first, so that the blocks of a sequence, once collected, are in memory as attention reads them.

    Args:
        layers: contents of the cache per layer.
        num_blocks: block 0 is for padding.
        block_size: tokens in a block.
    """

    def __init__(self, layers: Sequence[CacheLayer], num_blocks: int, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        for index, layer in enumerate(layers):
            shape = (layer.heads, num_blocks, block_size)
            for kind, size in (("keys", layer.key_size), ("values", layer.value_size)):
                self.register_buffer(f"{kind}_{index}", torch.zeros(*shape, size, dtype=layer.dtype))

    def at(self, positions: Tensor, block_tables: Tensor, replicas: Group | None = None) -> "CacheView":
        """The cache as a model sees it for new tokens.

        Args:
            positions: positions of the tokens, int64 `[batch, seq]`.
            block_tables: the blocks of each sequence, int64 `[batch, blocks per sequence]`.
            replicas: among which the model's tokens are divided, as by `part_of`; None if it gets all of them.
        """
        return CacheView(self, positions, block_tables, replicas)


def part_of(columns: Tensor, replicas: Group) -> Tensor:
    """This replica's part of new tokens: `[batch, seq]` to `[batch, seq/replicas]`.

    Its place is data, so that all replicas record one graph.
    """
    parts = columns.unflatten(1, (replicas.size, -1))
    return parts.index_select(1, replicas.rank_tensor(columns).view(1)).squeeze(1)


class CacheView:
    """The cache during one forward; arguments as of `KeyValueCache.at`.

    Attributes:
        mask: which slots each new token of this replica may inspect: bool `[batch, 1, seq, slots]`.
        newest: position of each sequence's last token, int64 `[batch, 1]`.
    """

    def __init__(
        self, cache: KeyValueCache, positions: Tensor, block_tables: Tensor, replicas: Group | None = None
    ) -> None:
        self._cache = cache
        self._block_tables = block_tables
        self._blocks = block_tables.gather(1, positions // cache.block_size)  # [batch, seq]
        self._offsets = positions % cache.block_size
        slots = torch.arange(block_tables.shape[1] * cache.block_size, device=positions.device)
        self._replicas = replicas
        self.newest = positions[:, -1:]
        own = positions if replicas is None else part_of(positions, replicas)
        self.mask = (slots <= own.unsqueeze(-1)).unsqueeze(1)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values of the new tokens; as the method of this name in transformers' caches.

        Those of all replicas: each writes the same.

        Args:
            keys: `[batch, heads/tp, seq, key]`.
            values: `[batch, heads/tp, seq, value]`.
            layer: counted from 0.

        Returns:
            All keys and values: `[batch, heads/tp, slots, key]` and `[..., value]`.
        """
        return self._written(f"keys_{layer}", keys), self._written(f"values_{layer}", values)

    def _written(self, name: str, new: Tensor) -> Tensor:
        stored: Tensor = getattr(self._cache, name)
        if self._replicas is not None:
            new = all_gather(new, self._replicas, dim=_SEQUENCE_DIM)
        stored.permute(1, 2, 0, 3).index_put_((self._blocks, self._offsets), new.transpose(1, 2))
        # Copies whole blocks; indexing by the table would go element by element.
        blocks = stored.index_select(1, self._block_tables.flatten()).unflatten(1, self._block_tables.shape)
        return blocks.flatten(2, 3).transpose(0, 1)


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
