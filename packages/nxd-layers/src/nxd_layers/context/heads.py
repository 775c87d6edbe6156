"""Whole sequences of some heads, in place of a part of the sequence of all heads (Jacobs et al. 2023, "DeepSpeed
Ulysses")."""

import torch
from nxd_state import Group
from torch import Tensor

from nxd_layers.context.cut import SequenceCut
from nxd_layers.mappings import all_to_all_region

_HEADS, _SEQUENCE = 1, 2


def splits_heads(num_heads: int, num_key_value_heads: int, size: int) -> bool:
    """Whether this many ranks can have as many heads each; key and value heads may be too few, and are copied then."""
    return num_heads % size == 0 and (num_key_value_heads % size == 0 or size % num_key_value_heads == 0)


def exchange_heads(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, cut: SequenceCut, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """From a part of the sequence to this rank's heads of all of it.

    Args:
        query: `[batch, heads, local, head]`.
        key: `[batch, kv_heads, local, head]`.
        value: `[batch, kv_heads, local, value_head]`.
        sinks: `[heads]` or None.
        cut: cut of the sequence.
        group: the context-parallel ranks.

    Returns:
        `[batch, heads/cp, filled, head]` and the others likewise, the sequence in order. Where there are fewer key and
        value heads than ranks, each rank has a copy of the one that its query heads need.
    """
    copies = max(1, group.size // key.shape[_HEADS])
    keys_and_values = torch.cat([key, value], dim=-1).repeat_interleave(copies, dim=_HEADS)
    whole = _to_heads(keys_and_values, cut, group)
    whole_key, whole_value = whole.split([key.shape[-1], value.shape[-1]], dim=-1)
    own_sinks = None
    if sinks is not None:
        own_sinks = sinks.view(group.size, -1).index_select(0, group.rank_tensor(sinks).view(1)).squeeze(0)
    return _to_heads(query, cut, group), whole_key, whole_value, own_sinks


def return_heads(output: Tensor, cut: SequenceCut, group: Group) -> Tensor:
    """The inverse for `[batch, heads/cp, filled, value_head]`: `[batch, heads, local, value_head]`."""
    filled = _filled(cut)
    by_rank = torch.cat([filled.part_of(output, rank, dim=_SEQUENCE) for rank in range(cut.size)], dim=_SEQUENCE)
    returned: Tensor = all_to_all_region(by_rank, group, _SEQUENCE, _HEADS)
    return returned


def _to_heads(local: Tensor, cut: SequenceCut, group: Group) -> Tensor:
    by_rank: Tensor = all_to_all_region(local, group, _HEADS, _SEQUENCE)
    return _filled(cut).whole_of(by_rank, dim=_SEQUENCE)


def _filled(cut: SequenceCut) -> SequenceCut:
    return SequenceCut(cut.filled_length, cut.size, cut.order, cut.multiple)
