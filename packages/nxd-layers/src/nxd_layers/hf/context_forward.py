"""A forward of a model of transformers over context-parallel ranks, as the model's parts see it.

Attention and masks enter through transformers' registries and read from here what they must know of the full sequences.
Layers that pass a state along the sequence (linear attention, state spaces, short convolutions) get full sequences,
gathered before them; each rank computes all of them and keeps its part: exact, but without saving time or activations
in these layers. Rotary embeddings whose frequencies depend on the longest position get all positions.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from nxd_state import active_group
from torch import Tensor, nn

from nxd_layers.context import (
    AttentionPlan,
    IntervalMask,
    MaskRule,
    SequenceCut,
    Transport,
    context_parallel_attention,
    interval_mask,
    with_blocks,
)
from nxd_layers.hf.mask_functions import BlockRule, rule_of
from nxd_layers.hf.sequence_parallel import SEQUENCE_DIM, change_hidden_states, change_output
from nxd_layers.hf.transformers_models import language_model, text_config
from nxd_layers.mappings import gather_from_sequence_parallel_region

ATTENTION = "nxd_context_parallel"  # our name in the registries

# Arguments of attention functions that masks, positions, the loss or the model have taken into account.
_USED_ELSEWHERE = (
    "sliding_window",
    "is_causal",
    "position_ids",
    "cache_position",
    "num_items_in_batch",
    "use_cache",
)

# The layers that pass a state along the sequence: their types in `config.layer_types`, and where a layer has the module
# that does so.
_LAYERS_WITH_STATE = {
    "linear_attention": ("linear_attn", "mamba", "mixer", "self_attn"),
    "conv": ("conv",),
    "hybrid": ("mamba",),
    "hybrid_sliding": ("mamba",),
}
_DEPENDS_ON_LENGTH = ("dynamic", "longrope")


@dataclass
class ContextForward:
    """A forward in progress.

    Attributes:
        cut: how the sequences are split over the ranks.
        position_ids: `[..., batch or 1, seq]`, of the full sequences; a multimodal model may make others of its own.
        document_ids: `[batch or 1, seq]`, for masks that separate documents; None where each sequence is one document.
        padding_mask: bool `[batch, seq]`; None without padding.
        shift_labels: `[batch, local]`, the next tokens of this rank's positions.
        transport: how its attention exchanges keys, values or heads.
        learned: bool `[batch, seq]`, whether the next token has a label, of the full sequences: a query must have keys
            at those positions. None if it need not, see `ContextParallelHooks`.
        separates_documents: whether the model has looked for documents in the positions, for the mask that it makes
            next.
        given_mask: the mask that the language model of a multimodal model got, instead of one that it makes.
    """

    cut: SequenceCut
    position_ids: Tensor
    document_ids: Tensor | None
    padding_mask: Tensor | None
    shift_labels: Tensor | None
    transport: Transport | None
    learned: Tensor | None = None
    separates_documents: bool = False
    given_mask: "ContextMask | None" = None
    _masks: dict[tuple[MaskRule, bool], "ContextMask"] = field(default_factory=dict)

    def mask_of(self, rule: MaskRule, device: torch.device) -> "ContextMask":
        """Return the mask of a rule, which is made once for all layers."""
        key = rule, self.separates_documents
        if key not in self._masks:
            self._masks[key] = self._planned(self._interval_mask(rule, device))
        self.separates_documents = False
        return self._masks[key]

    def mask_with_blocks(self, rule: BlockRule, device: torch.device) -> "ContextMask":
        """Return the mask of a rule with blocks of tokens that read each other, such as those of an image."""
        document_ids = self.document_ids if self.separates_documents else None
        if document_ids is not None and rule.window is not None and bool((rule.block_ids >= 0).any()):
            raise ValueError(
                "transformers numbers the tokens of image blocks in packed documents from the start of each document "
                "for layers with a window, so that other tokens read each other; pad rows instead of packing them"
            )
        mask = with_blocks(
            self._interval_mask(rule.rule, device),
            rule.block_ids.to(device),
            document_ids=document_ids,
            padding_mask=self.padding_mask,
        )
        self.separates_documents = False
        return self._planned(mask if rule.window is None else mask.within_window(rule.window))

    def _interval_mask(self, rule: MaskRule, device: torch.device) -> IntervalMask:
        document_ids = self.document_ids if self.separates_documents else None
        return interval_mask(
            self.cut.length, rule, document_ids=document_ids, padding_mask=self.padding_mask, device=device
        )

    def _planned(self, mask: IntervalMask) -> "ContextMask":
        if self.learned is not None:
            _check_learned_queries(mask, self.learned)
        return ContextMask(AttentionPlan(mask, self.cut), self.transport)


@dataclass(frozen=True, eq=False)
class ContextMask:
    """The object that a model of transformers takes for its mask, and passes to its attention."""

    plan: AttentionPlan
    transport: Transport | None


current_forward: ContextVar[ContextForward | None] = ContextVar("current_forward", default=None)


def _check_learned_queries(mask: IntervalMask, learned: Tensor) -> None:
    without_keys = learned & (mask.last < mask.first)
    if bool(without_keys.any()):
        row, place = without_keys.nonzero()[0].tolist()
        raise ValueError(
            f"the label of row {row}, position {place + 1}, is predicted at padding that attends to no token: eager "
            "attention in one process averages over all tokens there, which context parallelism does not; set that "
            "label to -100, pad at the end, or load the model with attn_implementation='sdpa'"
        )


def make_mask(*args: Any, mask_function: Callable[..., Any], device: torch.device, **kwargs: Any) -> ContextMask:
    """Make the mask of the forward in progress; this is the entry in transformers' registry of masks."""
    forward = current_forward.get()
    if forward is None:
        raise RuntimeError("a part of the model was called alone; with context parallelism call the model itself")
    if forward.given_mask is not None:
        return forward.given_mask
    rule = rule_of(mask_function)
    return forward.mask_with_blocks(rule, device) if isinstance(rule, BlockRule) else forward.mask_of(rule, device)


def is_search_taken_over() -> bool:
    """Return whether transformers must not search this rank's positions for documents: the mask has all of them."""
    forward = current_forward.get()
    if forward is None:
        return False
    forward.separates_documents = True
    return True


def attend(
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
    """Compute attention, `[batch, local, heads, head]`; this is the entry in transformers' registry of attention."""
    name = type(module).__name__
    if not isinstance(attention_mask, ContextMask):
        raise ValueError(
            f"{name} does not use a mask of transformers, so its sequences cannot be split; use context_parallel_size=1"
        )
    unknown = [it for it, given in kwargs.items() if it not in _USED_ELSEWHERE and is_set(given)]
    if unknown:
        raise ValueError(
            f"{name} passes {unknown[0]} to its attention, which context parallelism does not support; use "
            "context_parallel_size=1"
        )
    output = context_parallel_attention(
        query,
        key,
        value,
        attention_mask.plan,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
        transport=attention_mask.transport,
    )
    return output.transpose(1, 2).contiguous(), None


def is_set(value: Any) -> bool:
    """Return whether an argument has a value that turns something on."""
    return value is not None and (isinstance(value, Tensor) or bool(value))


def layers_with_state(model: Any) -> list[nn.Module]:
    """Return the modules of a model that pass a state along the sequence, as its config's `layer_types` says."""
    kinds = getattr(text_config(model), "layer_types", None) or []
    if not any(kind in _LAYERS_WITH_STATE for kind in kinds):
        return []
    decoder = language_model(model) or model
    lists = [
        it for name, it in decoder.named_modules() if name.rpartition(".")[2] == "layers" and len(it) == len(kinds)
    ]
    found = []
    for number, kind in enumerate(kinds):
        names = _LAYERS_WITH_STATE.get(kind, ())
        modules = [module for layers in lists for name in names if (module := getattr(layers[number], name, None))]
        if names and not modules:
            raise ValueError(
                f"layer {number} of {type(model).__name__} is of type {kind!r}, which passes a state along the "
                f"sequence, but has no module named {' or '.join(names)}; use context_parallel_size=1"
            )
        found += modules
    return found


class FullSequences:
    """Gives full sequences to the layers of a model that pass a state along the sequence.

    Attributes:
        layers: the layers.
        is_active: whether the sequences that they are given are split.
    """

    def __init__(self, model: Any) -> None:
        self.layers = layers_with_state(model)
        self.is_active = True
        for module in self.layers:
            module.register_forward_pre_hook(self._gather, with_kwargs=True)
            module.register_forward_hook(self._keep_part)

    def _gather(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return change_hidden_states(args, kwargs, _gathered) if self.is_active else (args, kwargs)

    def _keep_part(self, module: nn.Module, args: Any, output: Any) -> Any:
        return change_output(output, _own_part) if self.is_active else output


def _own_part(hidden: Tensor) -> Tensor:
    cut = SequenceCut(hidden.shape[SEQUENCE_DIM], active_group("cp").size)
    return cut.part_of(hidden, active_group("cp").rank, dim=SEQUENCE_DIM)


def _gathered(part: Tensor) -> Tensor:
    # Filler positions included: they come last, where a state has passed all tokens.
    cut = SequenceCut(part.shape[SEQUENCE_DIM] * active_group("cp").size, active_group("cp").size)
    gathered = gather_from_sequence_parallel_region(part, SEQUENCE_DIM, process_group=active_group("cp"))
    return cut.whole_of(gathered, dim=SEQUENCE_DIM)


def give_all_positions(model: nn.Module) -> None:
    """Give all positions to rotary embeddings whose frequencies depend on the longest one."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(kind in _DEPENDS_ON_LENGTH for kind in kinds):
            module.register_forward_pre_hook(_give_all_positions, with_kwargs=True)
            module.register_forward_hook(_keep_own_positions)


def _give_all_positions(module: nn.Module, args: Any, kwargs: Any) -> Any:
    forward = current_forward.get()
    if forward is None:  # in generate()
        return args, kwargs
    hidden, *rest = args
    positions = _like(rest[0] if rest else kwargs["position_ids"], forward.position_ids)
    return ((hidden, positions, *rest[1:]), kwargs) if rest else (args, {**kwargs, "position_ids": positions})


def _like(local: Tensor, positions: Tensor) -> Tensor:
    """The positions in the full sequences, in the layout in which the model gives this rank's to its embedding."""
    if local.dim() == 2:
        return positions if positions.dim() == 2 else positions[0]
    rows = positions if positions.dim() > 2 else positions.unsqueeze(0)
    return rows[-len(local) :].expand(len(local), -1, -1)  # without the row of text positions, if there is one


def _keep_own_positions(module: nn.Module, args: Any, output: Any) -> Any:
    forward = current_forward.get()
    if forward is None:
        return output
    return tuple(forward.cut.part_of(it, active_group("cp").rank, dim=-2) for it in output)
