"""The key-value cache: buffers of a rank's attention heads, in blocks, and the pool that assigns blocks to sequences.

A block table lists a sequence's blocks in order, so a token's position determines where its keys and values are stored.
A query attends to all positions up to its own. Padding has the last position, which no token attends to, and is stored
in block 0 where the table has no other block. Sequences with equal prefixes share blocks.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nxd_state import Group, all_gather
from torch import Tensor, nn

_SEQUENCE_DIM = 2  # of new keys and values


@dataclass(frozen=True)
class CacheLayer:
    """What one attention layer stores per token on this rank.

    Attributes:
        heads: number of this rank's key and value heads.
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

    Heads come first, so the gathered blocks of a sequence have the memory layout that attention reads.

    Args:
        layers: what each layer stores.
        num_blocks: number of blocks; block 0 is for padding.
        block_size: number of tokens per block.
    """

    def __init__(self, layers: Sequence[CacheLayer], num_blocks: int, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        for index, layer in enumerate(layers):
            shape = (layer.heads, num_blocks, block_size)
            for kind, size in (("keys", layer.key_size), ("values", layer.value_size)):
                self.register_buffer(f"{kind}_{index}", torch.zeros(*shape, size, dtype=layer.dtype))

    def at(
        self,
        positions: Tensor,
        block_tables: Tensor,
        replicas: Group | None = None,
        spans: tuple[Tensor, Tensor] | None = None,
    ) -> "CacheView":
        """Return the cache as a model uses it for new tokens; the arguments are those of `CacheView`."""
        return CacheView(self, positions, block_tables, replicas, spans)


def local_columns(columns: Tensor, replicas: Group) -> Tensor:
    """Return this replica's share of the new tokens: `[batch, seq]` to `[batch, seq/replicas]`.

    The replica's rank is data, not a constant, so all replicas record the same graph.
    """
    parts = columns.unflatten(1, (replicas.size, -1))
    return parts.index_select(1, replicas.rank_tensor(columns).view(1)).squeeze(1)


class CacheView:
    """The cache during one forward.

    Args:
        cache: the buffers.
        positions: positions of the new tokens, int64 `[batch, seq]`.
        block_tables: the blocks of each sequence, int64 `[batch, blocks per sequence]`.
        replicas: the process group that splits the model's tokens (see `local_columns`); None if this rank computes
            all of them.
        spans: first and last position of the tokens that each new token of this replica attends to in both directions,
            two int64 `[batch, seq]`; None if each token attends only to earlier ones.

    Attributes:
        mask: whether a new token of this replica may attend to a slot: bool `[batch, 1, seq, slots]`.
        newest: position of each sequence's last token, int64 `[batch, 1]`.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        positions: Tensor,
        block_tables: Tensor,
        replicas: Group | None = None,
        spans: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._cache = cache
        self._block_tables = block_tables
        self._blocks = block_tables.gather(1, positions // cache.block_size)  # [batch, seq]
        self._offsets = positions % cache.block_size
        self._slots = torch.arange(block_tables.shape[1] * cache.block_size, device=positions.device)
        self._replicas = replicas
        self.newest = positions[:, -1:]
        self._own = positions if replicas is None else local_columns(positions, replicas)
        self._first, last = (self._own, self._own) if spans is None else spans
        self.mask = (self._slots <= last.unsqueeze(-1)).unsqueeze(1)

    def mask_within(self, window: int) -> Tensor:
        """Return the mask of a layer whose tokens attend to the last `window` positions and to their spans."""
        oldest = torch.minimum(self._own - window + 1, self._first)
        return self.mask & (self._slots >= oldest.unsqueeze(-1)).unsqueeze(1)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values of the new tokens, as `update` of transformers' caches does.

        Every replica stores those of all replicas.

        Args:
            keys: `[batch, heads/tp, seq, key]`.
            values: `[batch, heads/tp, seq, value]`.
            layer: index of the layer.

        Returns:
            All keys and values: `[batch, heads/tp, slots, key]` and `[..., value]`.
        """
        return self._update(f"keys_{layer}", keys), self._update(f"values_{layer}", values)

    def _update(self, name: str, new: Tensor) -> Tensor:
        stored: Tensor = getattr(self._cache, name)
        if self._replicas is not None:
            new = all_gather(new, self._replicas, dim=_SEQUENCE_DIM)
        stored.permute(1, 2, 0, 3).index_put_((self._blocks, self._offsets), new.transpose(1, 2))
        # This copies whole blocks; indexing with the table would copy element by element.
        blocks = stored.index_select(1, self._block_tables.flatten()).unflatten(1, self._block_tables.shape)
        return blocks.flatten(2, 3).transpose(0, 1)


class BlockPool:
    """Allocates the blocks of a cache, and finds blocks that already hold the prefix of a text.

    A full block is identified by the hash of all tokens up to its end. Free blocks are reused in the order in which
    they were freed; until then, a sequence with the same prefix can use their contents.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_users = [0] * num_blocks
        # An ordered set: the next one to reuse comes first. Block 0 is for padding and is never allocated.
        self._free = dict.fromkeys(range(1, num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def get_cached(self, hashes: Iterable[bytes]) -> list[int]:
        """Take the blocks that hold the longest cached prefix of a text, given the hashes of its full blocks."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            self._free.pop(block, None)
            self._num_users[block] += 1
            blocks.append(block)
        return blocks

    def allocate(self, number: int) -> list[int]:
        """Take this many free blocks and forget their contents; the caller ensures that there are enough."""
        blocks = [block for block, _ in zip(self._free, range(number), strict=False)]
        assert len(blocks) == number
        for block in blocks:
            del self._free[block]
            self._num_users[block] = 1
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                del self._block_of[block_hash]
        return blocks

    def cache_full(self, block: int, block_hash: bytes) -> None:
        """Register the contents of a full block, unless another block has the same."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def free(self, blocks: Sequence[int]) -> None:
        """Release a sequence's blocks; the last ones, which others are least likely to share, are reused first."""
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._free[block] = None


class BlockHashes:
    """The hashes of a growing text's full blocks, each over all tokens up to the block's end.

    Args:
        tokens: the list of tokens; hashes follow as it grows.
        block_size: number of tokens per block.
        salt: texts with different salts have different hashes, so they share no blocks.
        content: function from the bounds of a block, in tokens, to what else the block depends on.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        block_size: int,
        salt: bytes = b"",
        content: Callable[[int, int], bytes] = lambda start, stop: b"",
    ) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._salt = salt
        self._content = content
        self._hashes: list[bytes] = []

    def up_to(self, num_tokens: int) -> list[bytes]:
        """Return the hashes of the blocks that the first `num_tokens` tokens fill."""
        number = num_tokens // self._block_size
        for index in range(len(self._hashes), number):
            previous = self._hashes[-1] if index else self._salt
            start = index * self._block_size
            stop = start + self._block_size
            block = array("q", self._tokens[start:stop]).tobytes()
            self._hashes.append(hashlib.sha256(previous + block + self._content(start, stop)).digest())
        return self._hashes[:number]
