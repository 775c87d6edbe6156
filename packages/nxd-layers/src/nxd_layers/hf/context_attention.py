"""What stands in transformers' registries of attention and of mask functions for sequences that are cut."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nxd_layers.context import MaskRule, context_parallel_attention
from nxd_layers.hf.context_forward import ContextMask, forward_under_way

ATTENTION = "nxd_context_parallel"  # its name in the registries

# Said by the mask, by positions, to the loss, or to the model.
_MEANT_ELSEWHERE = ("sliding_window", "is_causal", "position_ids", "cache_position", "num_items_in_batch", "use_cache")

_WINDOWS = {"sliding_window_overlay": True, "sliding_window_bidirectional_overlay": False}  # whether it is causal


def make_mask(*args: Any, mask_function: Callable[..., Any], device: torch.device, **kwargs: Any) -> ContextMask:
    """In place of a mask of transformers."""
    forward = forward_under_way.get()
    if forward is None:
        raise RuntimeError("a part of the model is called alone; with context parallelism call the model itself")
    return forward.mask_of(_rule_of(mask_function), device)


def is_search_taken_over() -> bool:
    """In place of transformers' search for documents in the positions, which are those of this rank."""
    forward = forward_under_way.get()
    if forward is None:
        return False
    forward.keeps_apart = True
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
    """In place of an attention function of transformers: `[batch, local, heads, head]`."""
    name = type(module).__name__
    if not isinstance(attention_mask, ContextMask):
        raise ValueError(f"{name} attends without a mask of transformers; use context_parallel_size=1")
    unknown = [it for it, given in kwargs.items() if it not in _MEANT_ELSEWHERE and is_asked(given)]
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
        dropout=dropout,
        transport=attention_mask.transport,
    )
    return output.transpose(1, 2).contiguous(), None


def is_asked(value: Any) -> bool:
    """Whether an argument asks for something."""
    return value is not None and (isinstance(value, Tensor) or bool(value))


def _rule_of(mask_function: Callable[..., Any]) -> MaskRule:
    """What a mask function of transformers says.

    Raises:
        ValueError: it is not one of those for texts.
    """
    causal, window, chunk, is_causal_window = False, None, None, False
    for part in _conjuncts(mask_function):
        kind, values = part.__qualname__.partition(".")[0], inspect.getclosurevars(part).nonlocals
        if kind == "causal_mask_function":
            causal = True
        elif kind in _WINDOWS and window is None:
            window, is_causal_window = values["sliding_window"], _WINDOWS[kind]
        elif kind == "chunked_overlay" and chunk is None:
            chunk = values["chunk_size"]
        elif kind != "bidirectional_mask_function":
            raise ValueError(f"context parallelism does not know the mask {part.__qualname__}; use none of one's own")
    if window is not None and is_causal_window != causal:
        raise ValueError("context parallelism does not know a causal window of a mask that is not, or the other way")
    return MaskRule(causal, window, chunk)


def _conjuncts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if function.__qualname__.startswith("and_masks."):
        for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
            yield from _conjuncts(part)
    else:
        yield function
