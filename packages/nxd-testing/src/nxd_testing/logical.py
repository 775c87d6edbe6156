"""Assembles whole tensors from the ranks' parts, to compare a layout with one process."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from nxd_state.shard_spec import Box, ShardSpec, get_shard_spec
from torch import Tensor, nn


@dataclass(frozen=True)
class LogicalPiece:
    """A box of a logical tensor, with its values."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    values: Tensor


def logical_pieces(named: Iterable[tuple[str, nn.Parameter, Tensor]]) -> list[LogicalPiece]:
    """Return this rank's pieces of tensors such as weights or gradients, each split like its parameter.

    Args:
        named: tuples of a name, a parameter, and a tensor of the parameter's shape.
    """
    pieces = []
    for name, parameter, tensor in named:
        values = tensor.detach()
        spec = get_shard_spec(parameter) or ShardSpec.whole(parameter.shape)
        for piece in spec.pieces:
            full_name = f"{name}:{piece.name}" if piece.name else name
            part = values[piece.local.slices].clone()
            pieces.append(LogicalPiece(full_name, piece.logical_shape, piece.logical, part))
    return pieces


def assemble_logical(pieces_by_rank: Sequence[Sequence[LogicalPiece]], *, rtol: float = 1e-12) -> dict[str, Tensor]:
    """Assemble the whole tensors by name.

    Args:
        pieces_by_rank: the result of `logical_pieces` on each rank.
        rtol: relative tolerance between ranks that hold the same box.

    Raises:
        AssertionError: an element is missing on all ranks, or its value differs between ranks.
    """
    wholes: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for pieces in pieces_by_rank:
        for piece in pieces:
            whole = wholes.setdefault(piece.name, torch.zeros(piece.shape, dtype=piece.values.dtype))
            seen = held.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.bool))
            index = piece.box.slices
            before = torch.where(seen[index], whole[index], piece.values)
            assert torch.allclose(before, piece.values, rtol=rtol, atol=1e-14), f"ranks disagree about {piece.name}"
            whole[index], seen[index] = piece.values, True
    missing = [name for name, seen in held.items() if not seen.all()]
    assert not missing, f"no rank holds all of {missing}"
    return wholes
