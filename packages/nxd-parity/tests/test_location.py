"""Where in its tensor a difference lies: the position, the rank's shard and its border, and the picture of both."""

import pytest
import torch
import torch.distributed as dist
from nxd_parity import compare, record
from torch import nn

ROWS, COLUMNS = 8, 6


class Sharded(nn.Module):
    """A layer whose ranks have parts of a weight, and update an element of it wrongly."""

    def __init__(self, part):
        super().__init__()
        whole = torch.arange(1.0, ROWS * COLUMNS + 1, dtype=torch.float64).view(ROWS, COLUMNS)
        self.weight = nn.Parameter(part(whole).clone())

    def forward(self, x):
        return x * 1.0


def train_part(folder, part, wrong=None, is_all=False):
    """Record a step that changes one element of a rank's part, or all, in another way than the reference.

    `wrong` is the rank and the element.
    """
    with record(folder):
        model = Sharded(part)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(torch.ones(2, 2, dtype=torch.float64, requires_grad=True)).sum().backward()
        optimizer.step()
        rank = dist.get_rank() if dist.is_initialized() else 0
        with torch.no_grad():
            if wrong is not None and rank == wrong[0]:
                model.weight[wrong[1]] += 5.0
            if is_all:
                model.weight += torch.linspace(1, 2, model.weight.numel()).view_as(model.weight) ** 3


def location(run_ranks, tmp_path, part, wrong=None, *, ranks=2, is_all=False):
    train_part(tmp_path / "reference", lambda whole: whole)
    run_ranks(lambda: train_part(tmp_path / "candidate", part, wrong, is_all), ranks)
    return compare(tmp_path / "reference", tmp_path / "candidate")


def test_first_row_of_a_shard_is_at_its_border(run_ranks, tmp_path):
    report = location(run_ranks, tmp_path, lambda it: it.chunk(2)[dist.get_rank()], (1, (0, 3)))

    found = report.location
    assert (found.index, found.rank, found.part) == ((4, 3), 1, ((4, 7), (0, 5)))
    assert str(found) == "at [4, 3] of [8, 6]; rank 1 has 4..7 (at the border) of dim 0"
    assert found.share == pytest.approx(1 / 48)


def test_distance_from_the_border_counts_positions(run_ranks, tmp_path):
    report = location(run_ranks, tmp_path, lambda it: it.chunk(2, 1)[dist.get_rank()], (0, (7, 0)))

    assert str(report.location) == "at [7, 0] of [8, 6]; rank 0 has 0..2 (2 from the border) of dim 1"


def test_picture_has_the_differing_cell_and_the_ranks_of_all_cells(run_ranks, tmp_path):
    found = location(run_ranks, tmp_path, lambda it: it.chunk(2)[dist.get_rank()], (1, (0, 3))).location

    assert (found.dims, found.cell, found.holders) == ((0, 1), (1, 1), ((0,), (1,)))
    assert [(row, column) for row in range(8) for column in range(6) if found.differences[row][column]] == [(4, 3)]
    assert found.differences[4][3] == 9
    assert found.owners == ((0,) * 6,) * 4 + ((1,) * 6,) * 4


def test_elements_that_no_rank_has_are_shown(run_ranks, tmp_path):
    report = location(run_ranks, tmp_path, lambda it: it.chunk(2)[0])

    assert report.first.fault == "wrong shard or order"
    assert report.location.owners == ((0,) * 6,) * 4 + ((-1,) * 6,) * 4
    assert report.location.holders == ((0, 1),)
    assert str(report.location) == "some of [8, 6] is on no rank"


def test_ranges_of_the_flattened_tensor_end_inside_a_row(run_ranks, tmp_path):
    def part(whole):
        return whole.flatten()[:20] if dist.get_rank() == 0 else whole.flatten()[20:]

    found = location(run_ranks, tmp_path, part, (1, (0,))).location

    assert found.index == (3, 2)
    assert str(found) == "at [3, 2] of [8, 6]; rank 1 has 20..47 (at the border) of the flattened tensor"
    assert found.owners[3] == (0, 0, 1, 1, 1, 1)
    assert found.differences[3] == (0, 0, 9, 0, 0, 0)


def test_interleaved_rows_have_owners_in_turn(run_ranks, tmp_path):
    found = location(run_ranks, tmp_path, lambda it: it[dist.get_rank() :: 2], (1, (1, 0))).location

    assert found.index == (3, 0)
    assert found.part[0] == (3, 3)
    assert [row[0] for row in found.owners] == [0, 1] * 4


def test_all_elements_are_on_a_scale_up_to_the_largest(run_ranks, tmp_path):
    found = location(run_ranks, tmp_path, lambda it: it, is_all=True).location

    assert found.share == 1
    assert found.differences[-1][-1] == 9
    assert found.differences[0][0] == 7  # an eighth of the largest
    assert str(found) == "at [7, 5] of [8, 6]; rank 0 has the whole tensor"


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.factor = 1.0

    def forward(self, x):
        mask = torch.ones_like(x)
        mask[1, 150, 9] = self.factor
        return x * self.scale * mask


def train_wide(folder, factor):
    with record(folder):
        model = Wide()
        model.factor = factor
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.linspace(1, 2, 2 * 200 * 10, dtype=torch.float64).sin().view(2, 200, 10)
        model(x).square().sum().backward()
        optimizer.step()


def test_large_tensor_is_drawn_as_cells_of_its_plane_through_the_difference(tmp_path):
    train_wide(tmp_path / "reference", 1.0)
    train_wide(tmp_path / "candidate", 3.0)

    found = compare(tmp_path / "reference", tmp_path / "candidate").location

    assert (found.index, found.dims, found.cell) == ((1, 150, 9), (1, 2), (4, 1))
    assert (len(found.differences), len(found.differences[0])) == (50, 10)
    assert [(at, row) for at, row in enumerate(found.differences) if any(row)] == [(37, (0,) * 9 + (9,))]
