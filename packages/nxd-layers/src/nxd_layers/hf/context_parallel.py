"""Context parallelism for unmodified models of transformers.

A model is given whole sequences. At its door they are cut, with positions and with labels that are shifted already; its
attention goes through transformers' registries of attention and mask functions; its loss is that of all tokens. All
else that it computes, it computes of the positions that are here.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch
from nxd_state import active_group, all_reduce
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nxd_layers.context import (
    AttentionPlan,
    MaskRule,
    SequenceCut,
    Transport,
    context_parallel_attention,
    interval_mask,
)
from nxd_layers.hf.transformers_models import register_attention, takes_causal_lm_loss

ATTENTION = "nxd_context_parallel"  # its name in the registries of transformers

_IGNORED_LABEL = -100
_CUT = {"input_ids": 0, "inputs_embeds": 0, "token_type_ids": 0}  # and the value at positions that are filled up
_HANDLED = ("attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch")
_MEANT_BY_MASK = ("sliding_window", "is_causal", "position_ids", "cache_position")  # or by positions


@dataclass
class _Forward:
    """What a forward under way knows of the whole sequences.

    Attributes:
        cut: of the sequences.
        document_ids: `[batch or 1, seq]`; None where each sequence is one document.
        padding_mask: bool `[batch, seq]`; None without padding.
        shift_labels: `[batch, local]`, the next tokens of this rank's positions.
        transport: of its attention.
    """

    cut: SequenceCut
    document_ids: Tensor | None
    padding_mask: Tensor | None
    shift_labels: Tensor | None
    transport: Transport | None
    _plans: dict[MaskRule, "ContextMask"] = field(default_factory=dict)

    def mask_of(self, rule: MaskRule, device: torch.device) -> "ContextMask":
        """Made once for all layers."""
        if rule not in self._plans:
            mask = interval_mask(
                self.cut.length, rule, document_ids=self.document_ids, padding_mask=self.padding_mask, device=device
            )
            self._plans[rule] = ContextMask(AttentionPlan(mask, self.cut), self.transport)
        return self._plans[rule]


@dataclass(frozen=True, eq=False)
class ContextMask:
    """What a model of transformers takes for its mask, and hands to its attention."""

    plan: AttentionPlan
    transport: Transport | None


_forward_under_way: ContextVar[_Forward | None] = ContextVar("_forward_under_way", default=None)


class ContextDoor:
    """What cuts the sequences that a model is given.

    Args:
        model: of transformers; split over the other axes already.
        transport: of its attention; the cheapest for each mask if None.
        multiple: what divides the positions of each chunk.

    Raises:
        ValueError: its attention does not go through transformers' registry.
    """

    def __init__(self, model: Any, transport: Transport | None, multiple: int) -> None:
        self._model = model
        self._transport = transport
        self._multiple = multiple
        self._signature = inspect.signature(model.forward)
        self._entered: list[Token[_Forward | None]] = []
        self._is_open = False
        self._previous = model.config._attn_implementation
        register_attention(ATTENTION, _attend, _make_mask)
        self._use(ATTENTION)
        if takes_causal_lm_loss(model):
            model.loss_function = ContextLoss(model.loss_function)
            self._has_loss = True
        else:
            self._has_loss = False
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Inside, sequences are not cut: each rank computes all of them, as `generate()` does."""
        entered, self._is_open = self._is_open, True
        self._use(self._previous)
        try:
            yield
        finally:
            self._is_open = entered
            self._use(ATTENTION)

    def _use(self, implementation: str) -> None:
        self._model.set_attn_implementation(implementation)
        if self._model.config._attn_implementation != implementation:
            raise ValueError(
                f"the attention of {type(self._model).__name__} does not go through transformers' registry of attention "
                "functions, so its sequences cannot be cut; use context_parallel_size=1"
            )

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_open:
            return None
        given = self._named(args, kwargs)
        forward = self._read(given)
        rank = active_group("cp").rank
        changed: dict[str, Any] = {}
        for name, fill in _CUT.items():
            if given.get(name) is not None:
                changed[name] = forward.cut.part_of(given[name], rank, fill=fill)
        tokens = next(iter(changed.values()))
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.arange(forward.cut.length, device=tokens.device).unsqueeze(0)
        changed["position_ids"] = forward.cut.part_of(positions, rank)
        # Of ones, so that the model does not look for documents in the positions.
        changed["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        if given.get("labels") is not None:
            changed["labels"] = forward.shift_labels
        if "use_cache" in self._signature.parameters:
            changed["use_cache"] = False
        self._entered.append(_forward_under_way.set(forward))
        rest = {name: it for name, it in given.items() if name not in changed and name != "shift_labels"}
        return (), {**rest, **changed}

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._entered:
            _forward_under_way.reset(self._entered.pop())

    def _named(self, args: Any, kwargs: Any) -> dict[str, Any]:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        further = [name for name, it in self._signature.parameters.items() if it.kind is it.VAR_KEYWORD]
        for name in further:
            given |= given.pop(name, {})
        return dict(given)

    def _read(self, given: Mapping[str, Any]) -> _Forward:
        self._check(given)
        tokens = next(it for name in _CUT if (it := given.get(name)) is not None)
        cut = SequenceCut(tokens.shape[1], active_group("cp").size, multiple=self._multiple)
        padding, positions = given.get("attention_mask"), given.get("position_ids")
        document_ids = None
        if padding is None and positions is not None:  # as transformers finds packed documents
            starts = positions.diff(dim=1) != 1
            if bool(starts.any()):
                document_ids = F.pad(starts.cumsum(dim=1), (1, 0))
        if padding is not None:
            padding = padding.bool()
            padding = None if bool(padding.all()) else padding
        labels = given.get("shift_labels")
        if labels is None and given.get("labels") is not None:
            labels = F.pad(given["labels"][:, 1:], (0, 1), value=_IGNORED_LABEL)
        if labels is not None:
            labels = cut.part_of(labels, active_group("cp").rank, fill=_IGNORED_LABEL)
        return _Forward(cut, document_ids, padding, labels, self._transport)

    def _check(self, given: Mapping[str, Any]) -> None:
        name = type(self._model).__name__
        if all(given.get(it) is None for it in _CUT):
            raise ValueError(f"{name} is given neither input_ids nor inputs_embeds, so there is no sequence to cut")
        tensors = [it for it, value in given.items() if isinstance(value, Tensor)]
        unknown = [it for it in tensors if it not in _CUT and it not in _HANDLED]
        if unknown:
            raise ValueError(f"{unknown[0]} cannot be cut over context-parallel ranks; leave it out")
        refused = [it for it in ("past_key_values", "logits_to_keep", "output_attentions") if _is_asked(given.get(it))]
        if refused:
            raise ValueError(
                f"{refused[0]} cannot be had of sequences that are cut over context-parallel ranks; leave it out, or "
                "call generate(), where every rank has whole sequences"
            )
        for it in ("attention_mask", "position_ids"):
            if given.get(it) is not None and given[it].dim() != 2:
                raise ValueError(f"{it} has shape {tuple(given[it].shape)}; with context parallelism give [batch, seq]")
        if "position_ids" not in self._signature.parameters:
            raise ValueError(f"{name} takes no position_ids, which it needs where its sequences are cut")
        if given.get("labels") is not None and not self._has_loss:
            raise ValueError(
                f"{name} computes its loss in its own way, which would be that of this rank's positions; leave labels "
                "out, and compute the loss from the logits"
            )


class ContextLoss:
    """The model's loss function, of all ranks' positions.

    Gradients are to be averaged over replicas and context-parallel ranks alike, as `nxd_optim` does, so a rank's own
    ones are those of the loss times the number of context-parallel ranks.
    """

    def __init__(self, of_positions_here: Callable[..., Tensor]) -> None:
        self._of_positions_here = of_positions_here

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = _IGNORED_LABEL,
        **kwargs: Any,
    ) -> Tensor:
        """The mean over the labels of all positions, 0-d, the same on all context-parallel ranks.

        Args:
            logits: `[batch, local, vocab]`, or what the loss function takes.
            labels: as the model was given them.
            vocab_size: for the loss function.
            num_items_in_batch: divides the sum of the losses, instead of the number of labels.
            ignore_index: label of tokens without loss.
            **kwargs: for the loss function.
        """
        forward = _forward_under_way.get()
        if forward is None:
            return self._of_positions_here(
                logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, **kwargs
            )
        assert forward.shift_labels is not None  # a loss is asked for with labels
        if num_items_in_batch is None:
            num_items_in_batch = all_reduce((forward.shift_labels != ignore_index).sum(), active_group("cp"))
        loss = self._of_positions_here(
            logits,
            None,
            vocab_size,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            **{**kwargs, "shift_labels": forward.shift_labels},
        )
        total: Tensor = _SumOverContexts.apply(loss)
        return total


class _SumOverContexts(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return all_reduce(part, active_group("cp"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * active_group("cp").size


def _make_mask(*args: Any, mask_function: Callable[..., Any], device: torch.device, **kwargs: Any) -> ContextMask:
    """In place of a mask of transformers."""
    forward = _forward_under_way.get()
    if forward is None:
        raise RuntimeError("a part of the model is called alone; with context parallelism call the model itself")
    return forward.mask_of(_rule_of(mask_function), device)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In place of an attention function of transformers: `[batch, local, heads, head]`."""
    name = type(module).__name__
    if not isinstance(attention_mask, ContextMask):
        raise ValueError(f"{name} attends without a mask of transformers; use context_parallel_size=1")
    if dropout:
        raise ValueError(
            f"{name} drops attention weights at random (dropout={dropout}), others than one process would; set "
            "attention_dropout=0 in the model's config"
        )
    unknown = [it for it, given in kwargs.items() if it not in _MEANT_BY_MASK and _is_asked(given)]
    if unknown:
        raise ValueError(f"{name} gives its attention {unknown[0]}, which context parallelism does not know")
    output = context_parallel_attention(
        query,
        key,
        value,
        attention_mask.plan,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        transport=attention_mask.transport,
    )
    return output.transpose(1, 2).contiguous(), None


def _is_asked(value: Any) -> bool:
    return value is not None and (isinstance(value, Tensor) or bool(value))


def _rule_of(mask_function: Callable[..., Any]) -> MaskRule:
    """What a mask function of transformers says.

    Raises:
        ValueError: it is not one of those for texts.
    """
    causal, window, chunk = False, None, None
    for part in _conjuncts(mask_function):
        kind, values = part.__qualname__.partition(".")[0], inspect.getclosurevars(part).nonlocals
        if kind == "causal_mask_function":
            causal = True
        elif kind == "sliding_window_overlay":
            window = values["sliding_window"]
        elif kind == "sliding_window_bidirectional_overlay":
            window = values["sliding_window"]
        elif kind == "chunked_overlay":
            chunk = values["chunk_size"]
        elif kind != "bidirectional_mask_function":
            raise ValueError(f"context parallelism does not know the mask {part.__qualname__}; use none of one's own")
    return MaskRule(causal, window, chunk)


def _conjuncts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if function.__qualname__.startswith("and_masks."):
        for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
            yield from _conjuncts(part)
    else:
        yield function
