"""The interface to language models that generation needs, and the traced module: such a model with its cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nxd_state import active_group, all_gather
from torch import Tensor, nn

from nxd_trace.generation.cache import CacheLayer, CacheView, KeyValueCache, part_of


class Decoder(Protocol):
    """A causal language model, as this package calls it. Implementations are `nn.Module`s."""

    @property
    def model(self) -> nn.Module:
        """The language model, whose parameters have the names of the unsharded model's."""

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model is made for."""

    def cache_layers(self) -> Sequence[CacheLayer]:
        """What each layer keeps on this rank."""

    def __call__(self, input_ids: Tensor, positions: Tensor, cache: CacheView) -> Tensor:
        """The whole logits that follow the last column, `[batch, vocab]`.

        Only attention may inspect other tokens: where replicas share a prompt, these are a part of it.

        Args:
            input_ids: int64 `[batch, seq]`.
            positions: positions of each token in its sequence, int64 `[batch, seq]`.
            cache: takes the keys and values of each layer, gives all of them and the mask.
        """


class CachedDecoder(nn.Module):
    """A decoder that keeps its cache in buffers, for `ModelBuilder`.

    Replicas of it share the columns of a prompt: each computes its part of them, as many as the others, and keeps the
    keys and values of all, so that any of them can continue alone.
    """

    def __init__(self, decoder: Decoder, num_blocks: int, block_size: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.cache = KeyValueCache(decoder.cache_layers(), num_blocks, block_size)

    def forward(self, input_ids: Tensor, positions: Tensor, block_tables: Tensor) -> Tensor:
        """The logits after the last column, `[batch, vocab]`.

        Args:
            input_ids: int64 `[batch, seq]`.
            positions: int64 `[batch, seq]`.
            block_tables: int64 `[batch, blocks per sequence]`.
        """
        replicas = active_group("dp")
        if replicas.size == 1 or input_ids.shape[1] % replicas.size:  # a single token is computed by all
            return self.decoder(input_ids, positions, self.cache.at(positions, block_tables))
        shared = self.cache.at(positions, block_tables, replicas)
        logits = self.decoder(part_of(input_ids, replicas), part_of(positions, replicas), shared)
        return all_gather(logits.unsqueeze(0), replicas, dim=0)[-1]  # the last columns are the last replica's


@dataclass(frozen=True)
class BuildCachedDecoder:
    """A `func` for `ModelBuilder`; a class because workers get it by pickle.

    Attributes:
        build: called in each worker, gives the decoder.
        num_blocks: number of blocks of the cache.
        block_size: tokens in each.
        max_length: maximum length of a sequence, in tokens.
    """

    build: Callable[[], Decoder]
    num_blocks: int
    block_size: int
    max_length: int

    def __call__(self) -> tuple[nn.Module, list[str]]:
        """The model, and the names of its state.

        Raises:
            TypeError: `build` gives something else than a decoder.
            ValueError: the model is made for shorter sequences.
        """
        decoder = self.build()
        if not isinstance(decoder, nn.Module) or not hasattr(decoder, "cache_layers"):
            raise TypeError(
                f"the function that builds the model returned a {type(decoder).__name__}; expected a decoder, such as "
                "HuggingFaceDecoder(model)"
            )
        if self.max_length > decoder.max_positions:
            raise ValueError(
                f"max_length={self.max_length} is more than the {decoder.max_positions} positions that the model "
                "supports; use that or less"
            )
        model = CachedDecoder(decoder, self.num_blocks, self.block_size)
        return model, [f"cache.{name}" for name, _ in model.cache.named_buffers()]
