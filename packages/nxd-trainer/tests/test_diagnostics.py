"""What is slow is named: a rank, or a stage or replica all of whose ranks are."""

import pytest
from nxd_state import Mesh
from nxd_trainer.training.diagnostics import Straggler, find_straggler

MESH = Mesh(8, pp=2, tp=2)  # ranks of stage 0 are 0 to 3; of replica 0 are 0, 1, 4, 5


@pytest.mark.parametrize(
    ("slow", "name"),
    [
        ([5], "rank 5 (stage 1, replica 0)"),
        ([4, 5, 6, 7], "stage 1"),
        ([2, 3, 6, 7], "replica 1"),
        ([0, 7], "rank 0 (stage 0, replica 0)"),
    ],
)
def test_straggler_is_named_by_the_largest_part_that_is_slow(slow, name):
    busy = [0.3 if rank in slow else 0.1 for rank in range(8)]

    assert find_straggler(busy, MESH) == Straggler(name, pytest.approx(3.0))


@pytest.mark.parametrize("busy", [[0.1, 0.14, 0.1, 0.1], [0.001, 0.009, 0.001, 0.001], [0.0, 0.0, 0.0, 0.0]])
def test_small_differences_are_no_straggler(busy):
    assert find_straggler(busy, Mesh(4)) is None
