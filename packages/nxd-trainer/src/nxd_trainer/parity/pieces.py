"""The pieces of a parameter, whether or not it is split."""

from collections.abc import Sequence

from nxd_state import Box, ShardPiece, get_shard_spec
from torch import Tensor


def pieces_of(parameter: Tensor) -> Sequence[ShardPiece]:
    """What this rank's part of a parameter holds; all of it in one piece if it is whole."""
    spec = get_shard_spec(parameter)
    if spec is not None:
        return spec.pieces
    whole = Box((0,) * parameter.dim(), tuple(parameter.shape))
    return [ShardPiece(whole, whole, whole.shape)]
