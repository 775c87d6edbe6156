"""What the mask functions of transformers compute, as rules.

The functions are read, and not the config: transformers passes masks as closures only, and whether conditions of the
model's own have been added to a window is written nowhere else. Functions other than these are refused.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nxd_layers.context import MaskRule

_WINDOWS = {"sliding_window_overlay": True, "sliding_window_bidirectional_overlay": False}  # whether it is causal
_BLOCKS = "blockwise_overlay"

MaskFunction = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class BlockRule:
    """A rule, and blocks whose queries read all of their block as well, such as the tokens of an image.

    Attributes:
        rule: the rule of queries outside blocks.
        block_ids: `[batch, seq]`, the block of each token, negative outside blocks.
        window: number of keys up to and including the query, also of queries inside blocks; None: no limit.
    """

    rule: MaskRule
    block_ids: Tensor
    window: int | None


def rule_of(mask_function: MaskFunction) -> MaskRule | BlockRule:
    """Return the rule that a mask function of transformers computes.

    Raises:
        ValueError: it computes something else.
    """
    parts = list(_parts_of(mask_function, "and_masks"))
    unions = [it for it in parts if _kind_of(it) == "or_masks"]
    if not unions:
        return _plain_rule(parts)
    others = [it for it in parts if it is not unions[0]]
    within = [part for union in unions for part in _parts_of(union, "or_masks")]
    blocks = [it for it in within if _kind_of(it) == _BLOCKS]
    rules = [it for it in within if _kind_of(it) != _BLOCKS]
    is_known = len(unions) == len(blocks) == len(rules) == 1 and all(_WINDOWS.get(_kind_of(it)) for it in others)
    if not is_known or len(others) > 1:
        raise _refusal(unions[0])
    rule = _plain_rule(list(_parts_of(rules[0], "and_masks")))
    if rule.chunk is not None:
        raise _refusal(unions[0])
    window = _values_of(others[0])["sliding_window"] if others else None
    return BlockRule(rule, _values_of(blocks[0])["block_sequence_ids"], window)


def _plain_rule(parts: list[MaskFunction]) -> MaskRule:
    causal, window, chunk, is_causal_window = False, None, None, False
    for part in parts:
        kind = _kind_of(part)
        if kind == "causal_mask_function":
            causal = True
        elif kind in _WINDOWS and window is None:
            window, is_causal_window = _values_of(part)["sliding_window"], _WINDOWS[kind]
        elif kind == "chunked_overlay" and chunk is None:
            chunk = _values_of(part)["chunk_size"]
        elif kind != "bidirectional_mask_function":
            raise _refusal(part)
    if window is not None and is_causal_window != causal:
        raise ValueError(
            "context parallelism does not support a causal window in a mask that is not causal, or the reverse; use "
            "context_parallel_size=1"
        )
    return MaskRule(causal, window, chunk)


def _parts_of(function: MaskFunction, combination: str) -> Iterator[MaskFunction]:
    """The functions of which one is the combination, "and_masks" or "or_masks"."""
    if _kind_of(function) == combination:
        for part in _values_of(function)["mask_functions"]:
            yield from _parts_of(part, combination)
    else:
        yield function


def _kind_of(function: MaskFunction) -> str:
    return function.__qualname__.partition(".")[0]


def _values_of(function: MaskFunction) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals)


def _refusal(function: MaskFunction) -> ValueError:
    return ValueError(
        f"context parallelism does not support the mask {function.__qualname__}; use context_parallel_size=1"
    )
