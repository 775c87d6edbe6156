"""Context parallelism for unmodified models of transformers.

A model is given full sequences. Hooks on it split them over the ranks, with their positions and with labels that are
shifted already; its attention goes through transformers' registries of attention and mask functions, and its loss is
that of all tokens. All other modules compute the positions on this rank, but for layers that pass a state along the
sequence (`nxd_layers.hf.context_forward`).

In a multimodal model, what is split are the inputs of its language model, into which the features of images have been
merged by then: each rank computes the embeddings and features of full sequences.

The prompt of `generate()` is split for its one forward (`nxd_layers.hf.context_prefill`).
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token
from typing import Any
from weakref import WeakSet

import torch
from nxd_state import active_group
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.context import MaskRule, SequenceCut, Transport, balanced_cut
from nxd_layers.context.cut import cut_under_way
from nxd_layers.hf.context_forward import (
    ATTENTION,
    ContextForward,
    ContextMask,
    FullSequences,
    attend,
    current_forward,
    give_all_positions,
    is_search_taken_over,
    is_set,
    layers_with_state,
    make_mask,
)
from nxd_layers.hf.context_prefill import Prefill, is_prompt
from nxd_layers.hf.loss import IGNORED_LABEL, ContextLoss
from nxd_layers.hf.merged_inputs import check_known, cross_attentions, cut_merged_inputs
from nxd_layers.hf.transformers_models import (
    adds_z_loss,
    intercept_document_search,
    language_model,
    register_attention,
    text_config,
)

_CUT = {"input_ids": 0, "inputs_embeds": 0, "token_type_ids": 0}  # with the value at filler positions
_HANDLED = ("attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch")

_ROWS_WITH_TEXT = 4  # of positions: of text, and in time, height and width

_CACHE_NAMES = ("cache", "past_key_values")  # since transformers 5.24, and before
_POSITIONS_OF_TOKENS = ("opt",)  # model types that number tokens, but not the padding before them

_cut_models: "WeakSet[nn.Module]" = WeakSet()


def cuts_sequences(model: Any) -> bool:
    """Return whether `parallelize` has made the model split its sequences over context-parallel ranks."""
    return model in _cut_models


def check_sequences(model: Any, *, sequence_parallel: bool) -> None:
    """Raise a ValueError if the sequences of a model cannot be split over context-parallel ranks.

    Args:
        model: a model of transformers.
        sequence_parallel: whether tensor-parallel ranks are to split its hidden states, too.
    """
    if sequence_parallel and (layers := layers_with_state(model)):
        raise ValueError(
            f"sequence_parallel=True is not supported for {type(layers[0]).__name__} with context-parallel ranks; "
            "leave sequence_parallel out"
        )
    register_attention(ATTENTION, attend, make_mask)
    decoder = language_model(model) or model
    previous = decoder.config._attn_implementation
    _use_attention(decoder, ATTENTION)
    _use_attention(decoder, previous)


def _use_attention(model: Any, implementation: str) -> None:
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise ValueError(
            f"the attention of {type(model).__name__} does not go through transformers' registry, so its sequences "
            "cannot be split; use context_parallel_size=1"
        )


class ContextParallelHooks:
    """The hooks that split the sequences a model is given.

    Args:
        model: a model of transformers that `check_sequences` accepts, sharded over the other axes already.
        transport: how its attention exchanges keys, values or heads; the cheapest way for each mask if None.
        multiple: a divisor of the number of positions of each chunk.
        has_known_loss: whether its loss function is that of causal language models, as `takes_causal_lm_loss` says.
    """

    def __init__(self, model: Any, transport: Transport | None, multiple: int, *, has_known_loss: bool) -> None:
        self._model = model
        self._decoder = language_model(model) or model
        self._is_multimodal = self._decoder is not model
        self._transport = transport
        self._multiple = multiple
        self._signature = inspect.signature(model.forward)
        self._inputs = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in self._signature.parameters else "past_key_values"
        self._entered: list[tuple[Token[ContextForward | None], Token[SequenceCut | None]]] = []
        self._prefill: Prefill | None = None
        self._is_active = True
        _give_own_configs(model)
        self._previous = self._decoder.config._attn_implementation
        # Other implementations give zeros to a query without keys, and so do sinks, which some layers may have.
        num_sinks = sum(name.endswith("sinks") for name, _ in model.named_parameters())
        num_layers = getattr(text_config(model), "num_hidden_layers", num_sinks + 1)
        self._averages_without_keys = self._previous == "eager" and num_sinks < num_layers
        self._with_state = FullSequences(model)
        give_all_positions(model)
        intercept_document_search(is_search_taken_over)
        _use_attention(self._decoder, ATTENTION)
        self._has_loss = has_known_loss
        if has_known_loss:
            model.loss_function = ContextLoss(model.loss_function)
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, always_call=True)
        if self._is_multimodal:
            _keep_cross_attention(self._decoder, self._previous)
            # Before the hooks of sequence parallelism, which split this rank's part.
            self._decoder.register_forward_pre_hook(self._enter_decoder, with_kwargs=True, prepend=True)
        _cut_models.add(model)

    @contextmanager
    def while_generating(self) -> Iterator[None]:
        """Split only long prompts meanwhile: each rank computes all other sequences, and has all of the cache."""
        self._set_active(False)
        token = current_forward.set(None)
        try:
            yield
        finally:
            self._end_prefill()
            current_forward.reset(token)
            self._set_active(True)

    def _set_active(self, is_active: bool) -> None:
        self._is_active = self._with_state.is_active = is_active
        _use_attention(self._decoder, ATTENTION if is_active else self._previous)

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        given = self._named(args, kwargs)
        if not self._is_active:
            return self._enter_generating(args, kwargs, given)
        self._check(given)
        forward = self._read(given)
        changed = {} if self._is_multimodal else self._cut_inputs(given, forward)
        if given.get("labels") is not None:
            changed["labels"] = forward.shift_labels
        if "use_cache" in self._signature.parameters:
            changed["use_cache"] = False
        self._begin(forward)
        rest = {name: it for name, it in given.items() if name not in changed and name != "shift_labels"}
        return (), {**rest, **changed}

    def _enter_generating(self, args: Any, kwargs: Any, given: Mapping[str, Any]) -> Any:
        tokens = next((it for name in _CUT if (it := given.get(name)) is not None), None)
        takes_positions = "position_ids" in self._signature.parameters
        if tokens is None or not takes_positions or self._with_state.layers or self._is_multimodal:
            return args, kwargs
        if not is_prompt(given, tokens.shape[1], given.get(self._cache_name)):
            return args, kwargs
        try:
            forward = self._read(given)
            forward.mask_of(MaskRule(), tokens.device)
        except ValueError:  # its padding is not at the ends, or would be counted
            return args, kwargs
        self._prefill = Prefill.of(forward.cut, given[self._cache_name])
        _use_attention(self._decoder, ATTENTION)
        self._begin(forward)
        of_prompt = self._prefill.arguments(tokens.device, self._cache_name)
        return (), {**given, **self._cut_inputs(given, forward), **of_prompt}

    def _enter_decoder(self, decoder: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cut what a multimodal model gives its language model."""
        forward = current_forward.get()
        if not self._is_active or forward is None:
            return args, kwargs
        given = _named(inspect.signature(decoder.forward), args, kwargs)
        check_known(given, [*_CUT, *_HANDLED])
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        if positions is not None:
            forward.position_ids = positions
        forward.given_mask = mask if isinstance(mask, ContextMask) else None
        changed = self._cut_inputs(given, forward)
        if isinstance(mask, dict):  # of the masks of each kind of layer, made from full sequences
            changed["attention_mask"] = mask
        if "use_cache" in self._inputs:
            changed["use_cache"] = False
        rank = _rank(next(iter(changed.values())))
        further = cut_merged_inputs(given, lambda it, dim: forward.cut.part_of(it, rank, dim=dim))
        return (), {**given, **changed, **further}

    def _cut_inputs(self, given: Mapping[str, Any], forward: ContextForward) -> dict[str, Any]:
        """Return this rank's part of ids, positions and mask, by name."""
        changed: dict[str, Any] = {}
        for name, fill in _CUT.items():
            if given.get(name) is not None:
                changed[name] = forward.cut.part_of(given[name], _rank(given[name]), fill=fill)
        tokens = next(iter(changed.values()))
        if "position_ids" in self._inputs:
            changed["position_ids"] = forward.cut.part_of(forward.position_ids, _rank(forward.position_ids), dim=-1)
        # None, so that the model looks for documents in the positions if it does so for full sequences.
        ones = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        changed["attention_mask"] = ones if forward.document_ids is None else None
        return changed

    def _begin(self, forward: ContextForward) -> None:
        # Drop the state of a forward that was interrupted.
        self._entered = [(current_forward.set(forward), cut_under_way.set(forward.cut))]

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._entered:
            of_forward, of_cut = self._entered.pop()
            current_forward.reset(of_forward)
            cut_under_way.reset(of_cut)
        if self._prefill is not None and output is not None:
            self._prefill.finish(output, self._cache_name)
        self._end_prefill()

    def _end_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill = None
            _use_attention(self._decoder, self._previous)

    def _named(self, args: Any, kwargs: Any) -> dict[str, Any]:
        given = _named(self._signature, args, kwargs)
        for name in _CACHE_NAMES:  # transformers accepts either
            if name in given and name != self._cache_name:
                given[self._cache_name] = given.pop(name)
        return given

    def _read(self, given: Mapping[str, Any]) -> ContextForward:
        tokens = next(it for name in _CUT if (it := given.get(name)) is not None)
        padding, positions = given.get("attention_mask"), given.get("position_ids")
        document_ids, of_text = None, positions
        if positions is not None and positions.dim() > 2:  # only a first row of four has the positions of text
            of_text = positions[0] if len(positions) == _ROWS_WITH_TEXT else None
        # As transformers finds packed documents, for models that ask for it, unless they make a cache.
        if padding is None and of_text is not None and not self._has_cache(given):
            starts = of_text.diff(dim=1) != 1
            if bool(starts.any()):
                document_ids = F.pad(starts.cumsum(dim=1), (1, 0))
        if padding is not None:
            padding = padding.bool()
            padding = None if bool(padding.all()) else padding
            counts_tokens = positions is None and self._model.config.model_type in _POSITIONS_OF_TOKENS
            is_refused = counts_tokens or self._with_state.layers
            if is_refused and padding is not None and not bool(padding[:, 0].all()):
                raise ValueError(
                    f"attention_mask has padding before tokens, which {type(self._model).__name__} would count; "
                    "pad at the end"
                )
        cut = self._cut_of(tokens, document_ids)
        if positions is None:
            positions = torch.arange(cut.length, device=tokens.device).unsqueeze(0)
        labels = given.get("shift_labels")
        ignored = given.get("ignore_index", IGNORED_LABEL)
        if labels is None and given.get("labels") is not None:
            labels = F.pad(given["labels"][:, 1:], (0, 1), value=ignored)
        learned = None
        if labels is not None:
            if padding is not None and self._averages_without_keys:
                learned = labels != ignored
            labels = cut.part_of(labels, _rank(labels), fill=ignored)
        return ContextForward(cut, positions, document_ids, padding, labels, self._transport, learned)

    def _has_cache(self, given: Mapping[str, Any]) -> bool:
        """Return whether the same call in one process would use a cache, given or made by the model."""
        if given.get(self._cache_name) is not None:
            return True
        uses = given.get("use_cache")
        configs = (self._model.config, text_config(self._model))
        uses = next((it.use_cache for it in configs if hasattr(it, "use_cache")), False) if uses is None else uses
        return "use_cache" in self._inputs and bool(uses)

    def _cut_of(self, tokens: Tensor, document_ids: Tensor | None) -> SequenceCut:
        size = active_group("cp").size
        if document_ids is None or self._with_state.layers:  # states do not separate documents
            return SequenceCut(tokens.shape[1], size, multiple=self._multiple)
        return balanced_cut(document_ids, size, multiple=self._multiple)

    def _check(self, given: Mapping[str, Any]) -> None:
        name = type(self._model).__name__
        if all(given.get(it) is None for it in _CUT):
            raise ValueError(f"{name} needs input_ids or inputs_embeds; pass one of them")
        tensors = [it for it, value in given.items() if isinstance(value, Tensor)]
        unknown = [it for it in tensors if it not in _CUT and it not in _HANDLED]
        if unknown and not self._is_multimodal:
            raise ValueError(f"{unknown[0]} cannot be split over context-parallel ranks; leave it out")
        asked = ("use_cache", "logits_to_keep", "output_attentions")
        refused = [self._cache_name] if given.get(self._cache_name) is not None else []
        refused += [it for it in asked if is_set(given.get(it))]
        if refused:
            raise ValueError(
                f"{refused[0]} is not supported for sequences that are split over context-parallel ranks; leave it "
                "out, or call generate(), where every rank has full sequences"
            )
        length = next(given[it] for it in _CUT if given.get(it) is not None).shape[1]
        for it in ("attention_mask", "position_ids", "labels", "shift_labels"):
            shape = tuple(getattr(given.get(it), "shape", ()))
            dims = (2, 3) if it == "position_ids" and self._is_multimodal else (2,)
            if given.get(it) is not None and (len(shape) not in dims or shape[-1] != length):
                raise ValueError(f"{it} has shape {shape}; with context parallelism pass [batch, {length}]")
        if self._model.training and getattr(self._model.config, "layerdrop", 0):
            raise ValueError(
                f"{name} drops layers at random (layerdrop={self._model.config.layerdrop}), and not the same ones on "
                "each rank; set layerdrop to 0 in the model's config"
            )
        if "position_ids" not in self._inputs and not self._with_state.layers:
            raise ValueError(
                f"{name} does not take position_ids, which split sequences need; use context_parallel_size=1"
            )
        asks_routers = given.get("output_router_logits") or getattr(
            text_config(self._model), "output_router_logits", False
        )
        if given.get("labels") is not None and asks_routers:
            raise ValueError(
                "output_router_logits=true adds a loss over this rank's positions only; set it to false, and balance "
                "experts over all positions by NxDModel.balance_experts, or [moe] of nxd train"
            )
        if given.get("labels") is not None and adds_z_loss(self._model):
            raise ValueError(
                f"z_loss_coefficient={self._model.config.z_loss_coefficient} adds a loss over this rank's "
                "positions only; build the model with 0, or use context_parallel_size=1"
            )
        if given.get("labels") is not None and not self._has_loss:
            raise ValueError(
                f"{name} has a loss function of its own, which would see this rank's positions only; leave labels "
                "out, and compute the loss from the logits"
            )


def _named(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    given = signature.bind_partial(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return dict(given)


def _give_own_configs(model: Any) -> None:
    """Give all parts of the model copies of their configs: another model may have been made from them, too."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if getattr(module, "config", None) is not None:
            module.config = copy.deepcopy(module.config, copies)


def _keep_cross_attention(decoder: nn.Module, implementation: str) -> None:
    """Have attention to the features of images, which all ranks have in full, use the model's own implementation."""
    for attention in [it for layer in decoder.modules() for it in cross_attentions(layer)]:
        own: Any = copy.deepcopy(attention.config)
        own._attn_implementation = implementation
        attention.config = own


def _rank(like: Tensor) -> Tensor:
    """Return the rank in the context-parallel group, as data."""
    return active_group("cp").rank_tensor(like)
