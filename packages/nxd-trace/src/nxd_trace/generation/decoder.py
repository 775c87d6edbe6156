"""Decoders: the interface of language models that generation needs, its implementation for transformers' models, and
the module that is traced: a decoder with its cache.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Protocol

import torch
from nxd_state import active_group, all_gather
from torch import Tensor, nn

from nxd_trace.generation.cache import CacheLayer, CacheView, KeyValueCache, local_columns
from nxd_trace.generation.prompt_inputs import PromptInputShapes, TokenInputs


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

    def __call__(self, input_ids: Tensor, positions: Tensor, cache: CacheView, *inputs: TokenInputs) -> Tensor:
        """Return the full logits after the last column, `[batch, vocab]`.

        Only attention may look at other tokens: replicas that share a prompt get only their columns of it.

        Args:
            input_ids: int64 `[batch, seq]`.
            positions: position of each token in its sequence, int64 `[batch, seq]`.
            cache: the cache; `update` stores a layer's keys and values and returns all of them.
            *inputs: of a model that takes more than token ids, the others.
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

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        block_tables: Tensor,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the logits after the last column, `[batch, vocab]`.

        Args:
            input_ids: int64 `[batch, seq]`.
            positions: int64 `[batch, seq]`.
            block_tables: int64 `[batch, blocks per sequence]`.
            inputs: further inputs of the tokens, see `PromptInputShapes.example`.
        """
        replicas = active_group("dp")
        others = [] if inputs is None else [TokenInputs(**inputs)]
        if replicas.size == 1 or input_ids.shape[1] % replicas.size:  # every replica computes a single token
            cache = self.cache.at(positions, block_tables, spans=_spans(others))
            return self.decoder(input_ids, positions, cache, *others)
        others = [it.local(replicas) for it in others]
        shared = self.cache.at(positions, block_tables, replicas, _spans(others))
        logits = self.decoder(local_columns(input_ids, replicas), local_columns(positions, replicas), shared, *others)
        return all_gather(logits.unsqueeze(0), replicas, dim=0)[-1]  # the last replica has the last column


def _spans(inputs: Sequence[TokenInputs]) -> tuple[Tensor, Tensor] | None:
    return next(((it.first, it.last) for it in inputs if it.first is not None and it.last is not None), None)


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

    Its forward is called with prepared masks and our cache, which has the `update` of transformers' caches. In a model
    of text and images, this is the forward of its language model: the arguments are put in as it is called, so that the
    rest of the model neither sees the cache nor looks for images. transformers itself is not imported.

    Args:
        model: the model, which may be on the meta device.
        shapes: what the model takes beside token ids; None if it is for text alone.

    Raises:
        TypeError: the model's forward does not take positions or a cache.
    """

    def __init__(self, model: nn.Module, shapes: PromptInputShapes | None = None) -> None:
        super().__init__()
        config: Any = model.config
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        # Not registered as a module: the names of the parameters are the model's.
        self._language_model = (model if text_config is config else language_model_of(model),)
        parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
        inner = inspect.signature(inspect.unwrap(type(self._language_model[0]).forward)).parameters
        self._cache_name = "cache" if "cache" in inner else "past_key_values"  # before transformers 5.24
        missing = [name for name in ("position_ids", self._cache_name) if name not in inner]
        if missing:
            raise TypeError(
                f"{type(model).__name__}.forward does not take {' and '.join(missing)}, so it cannot use a cache; "
                "use a causal language model with rotary positions"
            )
        self.model = model
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._window = _sliding_window(text_config)
        self.max_positions: int = min(
            text_config.max_position_embeddings, inf if self._window else _smallest_window(text_config)
        )
        self._layers = () if shapes is None else shapes.layers

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

    def forward(
        self, input_ids: Tensor, positions: Tensor, cache: "CacheView | _CacheProbe", inputs: TokenInputs | None = None
    ) -> Tensor:
        """Return the logits after the last column, `[batch, vocab]`, for `[batch, seq]` tokens."""
        mask = self._additive(cache.mask)
        masks: Tensor | dict[str, Tensor] = mask
        if self._window:
            masks = {"full_attention": mask, "sliding_attention": self._additive(cache.mask_within(self._window))}
        arguments = {"position_ids": positions, "use_cache": True, "return_dict": True, self._cache_name: cache}
        if self._language_model[0] is self.model:
            output = self.model(input_ids=input_ids, attention_mask=masks, **arguments, **self._last_only)
        else:
            arguments["attention_mask"] = masks
            if inputs is not None and inputs.rotary is not None:
                arguments["position_ids"] = inputs.rotary.permute(2, 0, 1)  # [axes, batch, seq]
            if inputs is not None and inputs.is_given is not None:
                input_ids = input_ids.masked_fill(inputs.is_given, 0)  # these ids may be outside the vocabulary
            with self._called_with(arguments, inputs):
                # With positions and a mask of four dimensions the model makes none of its own.
                output = self.model(
                    input_ids=input_ids,
                    position_ids=positions,
                    attention_mask=mask,
                    use_cache=False,
                    return_dict=True,
                    **self._last_only,
                )
        logits: Tensor = output.logits
        return logits[:, -1]

    @contextmanager
    def _called_with(self, arguments: Mapping[str, Any], inputs: TokenInputs | None) -> Iterator[None]:
        """Replace arguments of the language model and the embeddings of given tokens, and add features to layers."""
        model: Any = self._language_model[0]
        features = None if inputs is None else inputs.features

        def replaced(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...]:
            given = {**given, **arguments}
            if inputs is not None and features is not None and inputs.is_given is not None:
                is_given = inputs.is_given.unsqueeze(-1)
                given["inputs_embeds"] = torch.where(is_given, features[:, :, 0], given["inputs_embeds"])
            return args, given

        hooks = [model.register_forward_pre_hook(replaced, with_kwargs=True)]
        if features is not None:
            for layer, added in zip(self._layers, features.unbind(2)[1:], strict=True):
                hooks.append(model.layers[layer].register_forward_pre_hook(partial(_with_added, added)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _additive(self, mask: Tensor) -> Tensor:
        """Return a mask as what is added to scores: every attention implementation of transformers supports that."""
        dtype = next(self._language_model[0].parameters()).dtype
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return zeros.masked_fill(~mask, torch.finfo(dtype).min)


def _with_added(added: Tensor, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0] + added, *args[1:])


def language_model_of(model: Any) -> nn.Module:
    """Return the part of a model of text and images that reads embedded tokens: its layers, without its head."""
    found: nn.Module = model.get_decoder()
    return found


class _CacheProbe:
    """Stands in for a cache and records what each layer would store."""

    def __init__(self) -> None:
        self.stored: dict[int, CacheLayer] = {}  # not `layers`, which caches of transformers have
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)

    def mask_within(self, window: int) -> Tensor:
        del window
        return self.mask

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


def _sliding_window(config: Any) -> int | None:
    """Return the window of the layers of a model that takes a mask for each kind of layer: full and sliding ones."""
    kinds = set(getattr(config, "layer_types", None) or ())
    is_mixed = "sliding_attention" in kinds and kinds <= {"full_attention", "sliding_attention"}
    return config.sliding_window if is_mixed else None


def _smallest_window(config: Any) -> float:
    """Return the smallest attention window of any layer; longer sequences would need other masks for these layers."""
    windows = [getattr(config, "attention_chunk_size", None)]
    if getattr(config, "use_sliding_window", True):
        windows.append(getattr(config, "sliding_window", None))
    return min((window for window in windows if window), default=float("inf"))
