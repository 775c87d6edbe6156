"""Decoders: the interface of language models that generation needs, its implementation for transformers' models, and
the module that is traced: a decoder with its cache.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from nxd_state import active_group, all_gather
from torch import Tensor, nn

from nxd_trace.generation.cache import CacheLayer, CacheView, KeyValueCache, local_columns


class Decoder(Protocol):
    """A causal language model as generation calls it. Implementations are `nn.Module`s."""

    @property
    def model(self) -> nn.Module:
        """The language model; its parameters have the names of the unsharded model."""

    @property
    def max_positions(self) -> int:
        """Maximum length of a sequence."""

    def cache_layers(self) -> Sequence[CacheLayer]:
        """Return what each layer stores on this rank."""

    def __call__(self, input_ids: Tensor, positions: Tensor, cache: CacheView) -> Tensor:
        """Return the full logits after the last column, `[batch, vocab]`.

        Only attention may look at other tokens: replicas that share a prompt get only their columns of it.

        Args:
            input_ids: int64 `[batch, seq]`.
            positions: position of each token in its sequence, int64 `[batch, seq]`.
            cache: the cache; `update` stores a layer's keys and values and returns all of them.
        """


class CachedDecoder(nn.Module):
    """A decoder with its cache in buffers, for `ModelBuilder`.

    Replicas share the columns of a prompt: each computes an equal part and stores the keys and values of all, so that
    any of them can continue alone.
    """

    def __init__(self, decoder: Decoder, num_blocks: int, block_size: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.cache = KeyValueCache(decoder.cache_layers(), num_blocks, block_size)

    def forward(self, input_ids: Tensor, positions: Tensor, block_tables: Tensor) -> Tensor:
        """Return the logits after the last column, `[batch, vocab]`.

        Args:
            input_ids: int64 `[batch, seq]`.
            positions: int64 `[batch, seq]`.
            block_tables: int64 `[batch, blocks per sequence]`.
        """
        replicas = active_group("dp")
        if replicas.size == 1 or input_ids.shape[1] % replicas.size:  # every replica computes a single token
            return self.decoder(input_ids, positions, self.cache.at(positions, block_tables))
        shared = self.cache.at(positions, block_tables, replicas)
        logits = self.decoder(local_columns(input_ids, replicas), local_columns(positions, replicas), shared)
        return all_gather(logits.unsqueeze(0), replicas, dim=0)[-1]  # the last replica has the last column


@dataclass(frozen=True)
class BuildCachedDecoder:
    """A `func` for `ModelBuilder`; a class, so that it can be pickled.

    Attributes:
        build: function called in each worker that returns the decoder.
        num_blocks: number of blocks of the cache.
        block_size: number of tokens per block.
        max_length: maximum length of a sequence.
    """

    build: Callable[[], Decoder]
    num_blocks: int
    block_size: int
    max_length: int

    def __call__(self) -> tuple[nn.Module, list[str]]:
        """Return the model and the names of its state."""
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


class HuggingFaceDecoder(nn.Module):
    """A causal language model of transformers as a `Decoder`, whole or split by `nxd_layers.hf.parallelize`.

    Its forward is called with a prepared mask and our cache, which has the `update` of transformers' caches.
    transformers itself is not imported.

    Args:
        model: the model, which may be on the meta device.

    Raises:
        TypeError: the model's forward does not take positions or a cache.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # before transformers 5.24
        missing = [name for name in ("position_ids", self._cache_name) if name not in parameters]
        if missing:
            raise TypeError(
                f"{type(model).__name__}.forward does not take {' and '.join(missing)}, so it cannot use a cache; "
                "use a causal language model with rotary positions"
            )
        self.model = model
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        config: Any = model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.max_positions: int = min(config.max_position_embeddings, _smallest_window(config))

    def cache_layers(self) -> Sequence[CacheLayer]:
        """Return what each layer stores, found by recording the forward of one token, which computes nothing.

        Raises:
            AttributeError, TypeError: the model keeps something else than keys and values.
        """
        probe = _CacheProbe()
        device = next(self.model.parameters()).device
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        with torch.no_grad():
            torch.export.export(_ProbedDecoder(self, probe), (token,), strict=False)
        without = sorted(set(range(max(probe.stored, default=0) + 1)) - probe.stored.keys())
        if without:
            raise TypeError(f"layers {without} of the model keep no keys and values in its cache")
        return [probe.stored[index] for index in sorted(probe.stored)]

    def forward(self, input_ids: Tensor, positions: Tensor, cache: "CacheView | _CacheProbe") -> Tensor:
        """Return the logits after the last column, `[batch, vocab]`, for `[batch, seq]` tokens."""
        dtype = next(self.model.parameters()).dtype
        # An additive mask: every attention implementation of transformers supports it.
        mask = torch.zeros(cache.mask.shape, dtype=dtype, device=cache.mask.device)
        mask = mask.masked_fill(~cache.mask, torch.finfo(dtype).min)
        output = self.model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            return_dict=True,
            **{self._cache_name: cache},
            **self._last_only,
        )
        logits: Tensor = output.logits
        return logits[:, -1]


class _CacheProbe:
    """Stands in for a cache and records what each layer would store."""

    def __init__(self) -> None:
        self.stored: dict[int, CacheLayer] = {}  # not `layers`, which caches of transformers have
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.stored[layer] = CacheLayer(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        return keys, values

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model uses {name!r} of its cache, but this cache only keeps keys and values")


class _ProbedDecoder(nn.Module):
    def __init__(self, decoder: HuggingFaceDecoder, probe: _CacheProbe) -> None:
        super().__init__()
        self.decoder = decoder
        self.probe = probe

    def forward(self, token: Tensor) -> Tensor:
        self.probe.mask = self.probe.mask.to(token.device)
        return self.decoder(token, torch.zeros_like(token), self.probe)


def _smallest_window(config: Any) -> float:
    """Return the smallest attention window of any layer; longer sequences would need other masks for these layers."""
    windows = [getattr(config, "attention_chunk_size", None)]
    if getattr(config, "use_sliding_window", True):
        windows.append(getattr(config, "sliding_window", None))
    return min((window for window in windows if window), default=float("inf"))
