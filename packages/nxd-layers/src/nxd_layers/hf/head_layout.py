"""Which attention heads are on which rank, for any numbers of query heads and of key/value heads.

Query head h attends to key/value head h // (query heads / key/value heads). Where the ranks do not divide the key/value
heads, each of them is copied to several ranks, or heads of zeros are added, whichever takes fewer heads. Query heads
follow their key/value head, and heads of zeros fill the gaps, so that every key/value head on a rank serves the same
number of query heads there. Where the ranks do divide them, the layout is plain: equal runs of heads.
The numbers come from the attention modules of a model, which are told how many heads are on this rank.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nxd_state import Box, ShardPiece, ShardSpec
from torch import nn

from nxd_layers.hf.transformers_models import text_config
from nxd_layers.key_value_heads import KeyValueLayout

_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_MARKS = ("head_dim", "head_size", "qk_head_dim", "v_head_dim", "num_key_value_groups")
_GROUPS = "num_key_value_groups"
_VALUE_HEAD_SIZES = ("v_head_dim", "head_dim", "head_size")
_SIZE = "split_size"  # of all heads together
_OUTPUT_LAYERS = ("o_proj", "dense", "out_proj")
# Layers with as many key and value heads as query heads.
_LAYERS_OF_EQUAL_HEADS = ("query_key_value", "kv_b_proj")


@dataclass(frozen=True)
class HeadLayout:
    """Where heads are.

    Attributes:
        num_heads: query heads of the model.
        num_key_value_heads: key/value heads of the model; divides `num_heads`.
        tp_size: number of ranks.
        padded_key_value_heads: key/value heads with the heads of zeros, which come last.
        copies: copies of each key/value head, over all ranks.
        queries_per_copy: query heads, zeros included, that each copy serves.
    """

    num_heads: int
    num_key_value_heads: int
    tp_size: int
    padded_key_value_heads: int
    copies: int
    queries_per_copy: int

    @property
    def key_value_heads_per_rank(self) -> int:
        """Key/value heads on each rank, copies and zeros included."""
        return self.padded_key_value_heads * self.copies // self.tp_size

    @property
    def heads_per_rank(self) -> int:
        """Query heads on each rank, zeros included."""
        return self.key_value_heads_per_rank * self.queries_per_copy

    @property
    def is_plain(self) -> bool:
        """Whether every rank has an equal run of the model's own heads."""
        return self.copies == 1 and self.padded_key_value_heads == self.num_key_value_heads

    def query_heads_of(self, tp_rank: int) -> list[int | None]:
        """Return the model's head behind each query head of a rank; None for a head of zeros."""
        group = self.num_heads // self.num_key_value_heads
        heads: list[int | None] = []
        first = tp_rank * self.key_value_heads_per_rank
        for expanded in range(first, first + self.key_value_heads_per_rank):
            key_value_head, copy = divmod(expanded, self.copies)
            for index in range(copy * self.queries_per_copy, (copy + 1) * self.queries_per_copy):
                is_real = index < group and key_value_head < self.num_key_value_heads
                heads.append(key_value_head * group + index if is_real else None)
        return heads

    def key_value_layout(self, head_size: int) -> KeyValueLayout:
        """Return the layout of a key or value projection whose heads have this size."""
        padding = (self.padded_key_value_heads - self.num_key_value_heads) * head_size
        return KeyValueLayout(self.padded_key_value_heads, head_size, self.copies, self.tp_size, padding)

    def query_spec(self, logical_shape: tuple[int, ...], dim: int, tp_rank: int) -> ShardSpec:
        """Return the spec of a rank's shard of a tensor that has the query heads along `dim`."""
        head_size, rest = divmod(logical_shape[dim], self.num_heads)
        if rest:
            raise ValueError(
                f"dim {dim} of shape {logical_shape} does not hold {self.num_heads} heads of equal size; leave this "
                "layer out of the plan"
            )
        heads = self.query_heads_of(tp_rank)

        def box(first: int, length: int) -> Box:
            offset, shape = [0] * len(logical_shape), list(logical_shape)
            offset[dim], shape[dim] = first * head_size, length * head_size
            return Box(tuple(offset), tuple(shape))

        pieces = tuple(
            ShardPiece(box(slot, length), box(head, length), logical_shape) for slot, head, length in _runs(heads)
        )
        return ShardSpec(box(0, len(heads)).shape, pieces)


def smallest_head_layout(num_heads: int, num_key_value_heads: int, tp_size: int) -> HeadLayout:
    """Return the layout with the fewest heads per rank.

    Raises:
        ValueError: the number of key/value heads does not divide the number of query heads.
    """
    group, rest = divmod(num_heads, num_key_value_heads)
    if rest:
        raise ValueError(f"{num_key_value_heads} key/value heads do not divide {num_heads} query heads")
    padded_to = range(num_key_value_heads, num_key_value_heads + tp_size)
    layouts = []
    for padded in padded_to:
        copies = tp_size // math.gcd(padded, tp_size)
        layouts.append(HeadLayout(num_heads, num_key_value_heads, tp_size, padded, copies, -(-group // copies)))
    return min(layouts, key=lambda layout: (layout.heads_per_rank, layout.key_value_heads_per_rank))


def _runs(heads: list[int | None]) -> list[tuple[int, int, int]]:
    """Return runs of consecutive heads: the first one's index on the rank, its number in the model, and the length."""
    runs: list[tuple[int, int, int]] = []
    for slot, head in enumerate(heads):
        if head is None:
            continue
        if runs and runs[-1][0] + runs[-1][2] == slot and runs[-1][1] + runs[-1][2] == head:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((slot, head, 1))
    return runs


def attention_modules(model: nn.Module, split: Iterable[str]) -> dict[str, nn.Module]:
    """Return the attention modules among the parents of layers whose outputs are sharded.

    Args:
        model: the unsharded model.
        split: paths of the layers.
    """
    parents = dict.fromkeys(path.rpartition(".")[0] for path in split)
    found = {path: model.get_submodule(path) for path in parents}
    marks = (*_MARKS, *_QUERY_COUNTS)
    return {path: module for path, module in found.items() if any(hasattr(module, mark) for mark in marks)}


def attention_layout(path: str, attention: nn.Module, model: nn.Module, tp_size: int) -> HeadLayout:
    """Return where the heads of an attention module will be.

    Raises:
        ValueError: the number of heads is unknown, or they are not in groups of equal size.
    """
    num_heads = _num_heads(attention, model)
    key_value_heads = _num_key_value_heads(attention, model)
    if num_heads is None:
        raise ValueError(
            f"{path} ({type(attention).__name__}) has neither num_heads nor config.num_attention_heads, so its "
            "heads cannot be distributed over ranks; leave its layers out of the plan, or set one of them"
        )
    try:
        return smallest_head_layout(num_heads, key_value_heads or num_heads, tp_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def set_head_counts(attention: nn.Module, layout: HeadLayout) -> None:
    """Tell an attention module how many heads are on this rank; see `check_head_counts`."""
    for name, (_, here) in _counts(attention, layout).items():
        setattr(attention, name, here)
    if hasattr(attention, _SIZE):
        setattr(attention, _SIZE, getattr(attention, _SIZE) // layout.num_heads * layout.heads_per_rank)


def check_head_counts(path: str, attention: nn.Module, layout: HeadLayout) -> None:
    """Raise a ValueError if an attention module counts heads in an unknown way."""
    for name, (full, _) in _counts(attention, layout).items():
        if (count := getattr(attention, name)) != full:
            raise ValueError(
                f"{path}.{name} is {count}, but {full} was expected from the sizes of its layers, so its heads cannot "
                "be distributed over ranks; leave its layers out of the plan"
            )
    regrouped = layout.queries_per_copy != layout.num_heads // layout.num_key_value_heads
    if regrouped and not hasattr(attention, _GROUPS):
        raise ValueError(
            f"tensor_model_parallel_size={layout.tp_size} changes how many query heads of {path} share a key/value "
            f"head, which the module does not read from {_GROUPS}; use a degree that divides "
            f"{layout.num_key_value_heads}"
        )


def _counts(attention: nn.Module, layout: HeadLayout) -> dict[str, tuple[int, int]]:
    """Return the counts that a module has, by name: of the full model, and on this rank."""
    counts = {
        **dict.fromkeys(_QUERY_COUNTS, (layout.num_heads, layout.heads_per_rank)),
        **dict.fromkeys(_KEY_VALUE_COUNTS, (layout.num_key_value_heads, layout.key_value_heads_per_rank)),
        _GROUPS: (layout.num_heads // layout.num_key_value_heads, layout.queries_per_copy),
    }
    return {name: both for name, both in counts.items() if isinstance(getattr(attention, name, None), int)}


def _num_heads(attention: nn.Module, model: nn.Module) -> int | None:
    """Return the number in this layer, by its last projection's inputs: it may differ from the config's."""
    sizes = [getattr(attention, name, None) for name in _VALUE_HEAD_SIZES]
    size = next((it for it in sizes if isinstance(it, int)), None)
    output = next((getattr(attention, name) for name in _OUTPUT_LAYERS if hasattr(attention, name)), None)
    if size is not None and isinstance(output, nn.Linear) and output.in_features % size == 0:
        return output.in_features // size
    return _count(_QUERY_COUNTS, attention, model)


def _num_key_value_heads(attention: nn.Module, model: nn.Module) -> int | None:
    """Return None where each query head has its own."""
    key, size = getattr(attention, "k_proj", None), getattr(attention, "head_dim", None)
    if isinstance(key, nn.Linear) and isinstance(size, int) and key.out_features % size == 0:
        return key.out_features // size
    if any(hasattr(attention, name) for name in _LAYERS_OF_EQUAL_HEADS):
        return None
    return _count(_KEY_VALUE_COUNTS, attention, model)


def _count(names: Iterable[str], attention: nn.Module, model: nn.Module) -> int | None:
    config: Any = getattr(attention, "config", None) or text_config(model)
    for holder in (attention, config):
        for name in names:
            if isinstance(count := getattr(holder, name, None), int):
                return count
    return None
