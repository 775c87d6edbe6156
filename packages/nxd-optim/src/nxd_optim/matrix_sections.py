"""Which matrices a rank's part of a parameter belongs to.

A parameter's `ShardSpec` says which boxes of logical tensors a rank holds. A logical tensor is a matrix or a stack of
matrices, or several of them fused along their outputs, as its `MatrixLayout` says. A box of fused matrices is cut into
boxes of each of them: at most three per matrix, since all whole turns of the matrices make one strided view.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from nxd_state import Box
from nxd_state.parameter_marks import MatrixLayout
from torch import Tensor

from nxd_optim.flat_shards import StateShard
from nxd_optim.matrix_exchange import MatrixKey, MatrixPart


@dataclass(frozen=True, eq=False)
class Section:
    """A box of a matrix, or of a stack of matrices, that this rank holds.

    Attributes:
        name: name of the logical tensor, as in `ShardPiece`.
        index: index of the matrix among those that are fused in it.
        shape: shape of the whole matrix or stack.
        box: the elements.
        values: their values in the order of the box, possibly in more dims; shares memory with the shard's tensor.
    """

    name: str
    index: int
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def sections_of(shards: Iterable[StateShard], layout: MatrixLayout) -> list[Section]:
    """Return boxes of logical tensors as boxes of the matrices that these hold.

    Raises:
        ValueError: a logical tensor is neither a matrix nor a stack of matrices, or does not hold such sections.
    """
    sections: list[Section] = []
    for it in shards:
        if len(it.logical_shape) not in (2, 3):
            raise ValueError(
                f"a parameter of logical shape {tuple(it.logical_shape)} is not a matrix; give it to AdamW by "
                "use_muon=False, as nxd_optim.muon_parameter_groups(model) does"
            )
        if layout.sections:
            sections += _cut(it, layout)
        else:
            sections.append(Section(it.name, 0, it.logical_shape, it.box, it.tensor))
    return sections


def matrix_parts(parameter: int, sections: Iterable[Section]) -> list[MatrixPart]:
    """Return boxes of matrices and of stacks as boxes of single matrices.

    Args:
        parameter: index of the parameter.
        sections: this rank's boxes of its matrices.
    """
    parts = []
    for it in sections:
        if len(it.shape) == 2:
            parts.append(MatrixPart(MatrixKey(parameter, it.name, 0, it.index), it.shape, it.box, it.values))
            continue
        inner = Box(it.box.offset[1:], it.box.shape[1:])
        for matrix, values in enumerate(it.values, start=it.box.offset[0]):
            key = MatrixKey(parameter, it.name, matrix, it.index)
            parts.append(MatrixPart(key, it.shape[1:], inner, values))
    return parts


def outputs_and_inputs(shape: Sequence[int], layout: MatrixLayout) -> torch.Size:
    """Return the shape of a matrix, or of those of a stack, as `[outputs, inputs]`."""
    rows, columns = shape[-2:]
    return torch.Size((rows, columns) if layout.outputs_dim == -2 else (columns, rows))


def _cut(shard: StateShard, layout: MatrixLayout) -> Iterator[Section]:
    """Yield the boxes of each fused matrix in a box of the logical tensor that holds them."""
    dim = len(shard.logical_shape) + layout.outputs_dim
    turn, length = sum(layout.sections), shard.logical_shape[dim]
    if length % turn:
        raise ValueError(
            f"dim {dim} of a parameter of logical shape {tuple(shard.logical_shape)} cannot hold matrices of "
            f"{list(layout.sections)} outputs that take turns; correct the parameter's matrix_layout"
        )
    first = shard.box.offset[dim]
    stop = first + shard.box.shape[dim]
    whole = min(-(-first // turn) * turn, stop), max(stop // turn * turn, first)  # the whole turns, if there are any
    for begin, end in pairwise(sorted((first, *whole, stop))):
        for index, (start, outputs) in enumerate(zip(_starts(layout), layout.sections, strict=True)):
            shape, box_shape, offset = (list(it) for it in (shard.logical_shape, shard.box.shape, shard.box.offset))
            shape[dim] = length // turn * outputs
            turns, inside = divmod(begin, turn)
            if end - begin > turn:
                offset[dim], box_shape[dim] = turns * outputs, (end - begin) // turn * outputs
                by_turn = shard.tensor.narrow(dim, begin - first, end - begin).unflatten(dim, (-1, turn))
                values = by_turn.narrow(dim + 1, start, outputs)
            else:
                low = max(inside, start)
                count = min(inside + end - begin, start + outputs) - low
                if count <= 0:
                    continue
                offset[dim], box_shape[dim] = turns * outputs + low - start, count
                values = shard.tensor.narrow(dim, begin - first + low - inside, count)
            yield Section(shard.name, index, tuple(shape), Box(tuple(offset), tuple(box_shape)), values)


def _starts(layout: MatrixLayout) -> list[int]:
    return [0, *accumulate(layout.sections[:-1])]
