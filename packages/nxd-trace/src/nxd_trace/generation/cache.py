"""The key-value cache of a rank's attention heads: fixed shapes, written in place, one row per sequence.

A token's slot in the cache is its position in the sequence. So the position of a query alone decides which slots it may
attend to: those up to its own, all of which hold tokens of its sequence. Padding is put into the last slot, which no
attended token ever needs; slots beyond a sequence's end are never attended to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class CacheLayer:
    """The cache entries of one attention layer per token, on this rank.

    Attributes:
        heads: key and value heads of this rank.
        key_size: length of each key.
        value_size: length of each value.
        dtype: of both.
    """

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype


class KeyValueCache(nn.Module):
    """Buffers `keys_<layer>` and `values_<layer>` of all layers, `[batch, heads/tp, max_length, size]`.

    Args:
        layers: what each layer keeps.
        batch_size: number of sequences.
        max_length: slots per sequence; the last one is for padding.
    """

    def __init__(self, layers: Sequence[CacheLayer], batch_size: int, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        for index, layer in enumerate(layers):
            shape = (batch_size, layer.heads, max_length)
            for kind, size in (("keys", layer.key_size), ("values", layer.value_size)):
                self.register_buffer(f"{kind}_{index}", torch.zeros(*shape, size, dtype=layer.dtype))

    def at(self, positions: Tensor) -> "CacheView":
        """The cache as a model sees it for new tokens at these positions, int64 `[batch, seq]`."""
        return CacheView(self, positions)


class CacheView:
    """The cache during one forward.

    Args:
        cache: to write to.
        positions: of the new tokens, and so their slots: int64 `[batch, seq]`.

    Attributes:
        mask: which slots each new token may look at: bool `[batch, 1, seq, max_length]`.
    """

    def __init__(self, cache: KeyValueCache, positions: Tensor) -> None:
        self._cache = cache
        self._positions = positions
        slots = torch.arange(cache.max_length, device=positions.device)
        self.mask = (slots <= positions.unsqueeze(-1)).unsqueeze(1)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values of the new tokens; as the method of this name in transformers' caches.

        Args:
            keys: `[batch, heads/tp, seq, key]`.
            values: `[batch, heads/tp, seq, value]`.
            layer: counted from 0.

        Returns:
            All keys and values: `[batch, heads/tp, max_length, key]` and `[..., value]`.
        """
        return self._written(f"keys_{layer}", keys), self._written(f"values_{layer}", values)

    def _written(self, name: str, new: Tensor) -> Tensor:
        stored: Tensor = getattr(self._cache, name)
        stored.scatter_(2, self._positions[:, None, :, None].expand_as(new), new)
        return stored
