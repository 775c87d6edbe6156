"""Moving the rows of a split weight between the ranks when the length that is cut into equal parts changes."""

from collections.abc import Sequence

import torch
from nxd_state import Group, ShardSpec, all_gather, set_shard_spec
from torch import nn


@torch.no_grad()
def repartition(parameter: nn.Parameter, old_specs: Sequence[ShardSpec], new_spec: ShardSpec, group: Group) -> None:
    """Give a parameter, in place, the parts of its logical tensors that `new_spec` says; padding becomes zero.

    The whole tensors are gathered on the way; on the meta device nothing is.

    Args:
        parameter: keeps its identity and attributes, so ties and optimizers stay valid.
        old_specs: how the logical tensors are cut now, one spec per rank of the group.
        new_spec: how this rank's part is to be cut.
        group: the ranks that hold the parts.
    """
    data = parameter.new_zeros(new_spec.local_shape)
    if not parameter.is_meta:
        gathered = all_gather(parameter.detach().unsqueeze(0), group)  # [tp, *local]
        pieces = [(local, piece) for local, spec in zip(gathered, old_specs, strict=True) for piece in spec.pieces]
        wholes = {name: parameter.new_empty(shape) for name, shape in _logical_shapes(old_specs).items()}
        for local, piece in pieces:
            wholes[piece.name][piece.logical.slices] = local[piece.local.slices]
        for piece in new_spec.pieces:
            data[piece.local.slices] = wholes[piece.name][piece.logical.slices]
    parameter.data = data
    set_shard_spec(parameter, new_spec)


def _logical_shapes(specs: Sequence[ShardSpec]) -> dict[str, tuple[int, ...]]:
    return {piece.name: piece.logical_shape for spec in specs for piece in spec.pieces}
