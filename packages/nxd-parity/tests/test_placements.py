"""Where the activations of a rank belong, if it has rows of the batch: its inputs say which."""

import pytest
import torch
from nxd_parity import compare, record
from nxd_parity.events import Placement


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """`compared(reference, *ranks)`: the report of tensors of one step, each (kind, name, values, placement)."""

    def write(side, rank, ranks, tensors):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        with record(tmp_path / side, by_hand=True) as recorder:
            recorder.tensor("parameter", "w", torch.ones(3), placement=Placement((3,), (0,)))
            for kind, name, values, placement in tensors:
                recorder.tensor(kind, name, values, placement=placement)
            loss = torch.tensor(1.0 + (side == "wrong"), dtype=torch.float64)
            recorder.tensor("loss", "", loss, placement=Placement((), ()))
            recorder.end_step()

    def compare_with(reference, *ranks, side="right"):
        write("one", 0, 1, reference)
        for rank, tensors in enumerate(ranks):
            write(side, rank, len(ranks), tensors)
        return compare(tmp_path / "one", tmp_path / side)

    return compare_with


def test_placement_of_a_rank_s_own_batch_is_in_the_rows_of_its_inputs(compared):
    inputs, out = drawn(4, 6), drawn(4, 8, seed=1)

    report = compared(
        [("input", "", inputs, None), ("activation", "up", out, None)],
        *[
            [
                ("input", "", inputs[rows : rows + 2], None),
                ("activation", "up", out[rows : rows + 2, columns : columns + 4], Placement((2, 8), (0, columns))),
            ]
            for rows in (0, 2)
            for columns in (0, 4)
        ],
    )

    assert (report.agrees, report.not_compared) == (True, {})
    assert report.agree["activation"] == 1


def test_wrong_values_are_compared_with_the_rows_of_the_rank_s_inputs(compared):
    inputs, out = drawn(4, 6), drawn(4, 8, seed=1)
    out[2:] *= 3  # values near zero are nearer to the other rows

    report = compared(
        [("input", "", inputs, None), ("activation", "up", out, None)],
        [("input", "", inputs[:2], None), ("activation", "up", out[:2], None)],
        [("input", "", inputs[2:], None), ("activation", "up", 0.1 * drawn(2, 8, seed=2), None)],
        side="wrong",
    )

    assert (report.first.name, report.first.ranks) == ("up", (1,))
    assert report.first.index[0] >= 2
