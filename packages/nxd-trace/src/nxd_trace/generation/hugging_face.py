"""Decoders from causal language models of transformers, whole or split by `nxd_layers.hf.parallelize`."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nxd_trace.generation.cache import CacheLayer, CacheView


class HuggingFaceDecoder(nn.Module):
    """A causal language model of transformers as a `Decoder`.

    The model's forward is called with a prepared mask and our cache, whose `update` is that of transformers' caches;
    transformers itself is not imported.

    Args:
        model: in memory, or on the meta device.

    Raises:
        TypeError: the model's forward does not take positions or a cache.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        taken = inspect.signature(inspect.unwrap(type(model).forward)).parameters
        self._cache_name = "cache" if "cache" in taken else "past_key_values"  # before transformers 5.24
        missing = [name for name in ("position_ids", self._cache_name) if name not in taken]
        if missing:
            raise TypeError(
                f"{type(model).__name__}.forward does not take {' and '.join(missing)}, so it cannot use a cache; "
                "use a causal language model with rotary positions"
            )
        self.model = model
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        config: Any = model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.max_positions: int = min(config.max_position_embeddings, _window(config))

    def cache_layers(self) -> Sequence[CacheLayer]:
        """Found by recording one token, which computes nothing and sees every kind of attention as it is."""
        probe = _Probe()
        device = next(self.model.parameters()).device
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        with torch.no_grad():
            torch.export.export(_Probed(self, probe), (token,), strict=False)
        return [probe.layers[index] for index in range(len(probe.layers))]

    def forward(self, input_ids: Tensor, positions: Tensor, cache: "CacheView | _Probe") -> Tensor:
        """`[batch, seq]` to the logits after the last column, `[batch, vocab]`."""
        dtype = next(self.model.parameters()).dtype
        # Added to the scores: what every attention implementation of transformers understands.
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


class _Probe:
    """Stands in for a cache and records the entries that each layer would keep."""

    def __init__(self) -> None:
        self.layers: dict[int, CacheLayer] = {}
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.layers[layer] = CacheLayer(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        return keys, values

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model uses {name!r} of its cache, but this cache only keeps keys and values")


class _Probed(nn.Module):
    def __init__(self, decoder: HuggingFaceDecoder, probe: _Probe) -> None:
        super().__init__()
        self.decoder = decoder
        self.probe = probe

    def forward(self, token: Tensor) -> Tensor:
        self.probe.mask = self.probe.mask.to(token.device)
        return self.decoder(token, torch.zeros_like(token), self.probe)


def _window(config: Any) -> float:
    """How far the layers that look back least do so; longer sequences would need other masks for these."""
    windows = [getattr(config, "attention_chunk_size", None)]
    if getattr(config, "use_sliding_window", True):
        windows.append(getattr(config, "sliding_window", None))
    return min((window for window in windows if window), default=float("inf"))
