"""Boxes of fused matrices: every element of a rank's part is in one matrix, where the matrices hold it."""

import pytest
import torch
from nxd_optim.flat_shards import shards_of_range
from nxd_optim.matrix_sections import matrix_parts, sections_of
from nxd_state.parameter_marks import MatrixLayout

CASES = [
    ((24, 3), MatrixLayout(sections=(12, 6, 6))),
    ((24, 3), MatrixLayout(sections=(1, 2, 1))),
    ((3, 24), MatrixLayout(-1, (12, 12))),
    ((3, 24), MatrixLayout(-1, (1, 1))),
    ((2, 12, 3), MatrixLayout(sections=(6, 6))),
    ((2, 3, 12), MatrixLayout(-1, (1, 1))),
    ((2, 12, 3), MatrixLayout()),
]


def matrices_of(whole, layout):
    """The matrices of a logical tensor, by index in the stack and among the fused ones."""
    stack = whole if whole.dim() == 3 else whole[None]
    if not layout.sections:
        return {(index, 0): matrix for index, matrix in enumerate(stack)}
    found = {}
    for index, matrix in enumerate(stack):
        turns = matrix.movedim(layout.outputs_dim, 0).unflatten(0, (-1, sum(layout.sections)))
        for section, outputs in enumerate(turns.split(layout.sections, dim=1)):
            found[index, section] = outputs.flatten(0, 1).movedim(0, layout.outputs_dim)
    return found


@pytest.mark.parametrize(("shape", "layout"), CASES)
@pytest.mark.parametrize("cuts", [(72,), (1, 72), (13, 26, 72), (18, 54, 72), (5, 29, 31, 72)])
def test_parts_of_all_ranges_fill_the_matrices(shape, layout, cuts):
    whole = torch.arange(72.0).view(shape)
    expected = matrices_of(whole, layout)
    found = {key: torch.full_like(it, -1) for key, it in expected.items()}

    for start, stop in zip((0, *cuts), cuts, strict=False):
        shards = shards_of_range(torch.empty(shape), start, stop, whole.flatten()[start:stop])
        for part in matrix_parts(0, sections_of(shards, layout)):
            matrix = found[part.key.index, part.key.section]
            assert part.shape == tuple(matrix.shape)
            assert (matrix[part.box.slices] == -1).all()
            matrix[part.box.slices] = part.values.reshape(part.box.shape)

    for key, matrix in expected.items():
        assert torch.equal(found[key], matrix)


def test_sections_share_memory_with_the_shard():
    flat = torch.zeros(72)
    shards = shards_of_range(torch.empty(3, 24), 0, 72, flat)

    for it in sections_of(shards, MatrixLayout(-1, (1, 1))):
        it.values.fill_(it.index + 1)

    assert torch.equal(flat.view(3, 12, 2), torch.tensor([1.0, 2.0]).expand(3, 12, 2))
