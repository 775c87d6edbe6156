"""Whatever part of the unsynced changes a power failure takes, the disk holds the old checkpoint or the new one.

Every state that a disk may be in (see `power_loss.py`) at every moment of a save is made and loaded. With any one fsync
left out, some state is neither: so none can be taken from the code without a test turning red.
"""

import pytest
from nxd_ckpt import CheckpointError

from .power_loss import Disk, write_state
from .saves import NEW_TAG, OVERWRITE, check_old_or_new, copy_of, make_old, sabotaged_save, value_of
from .system_calls import Sabotage

pytestmark = pytest.mark.sample(2)  # each takes its time


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """`start(kind, folder)`: the root from which a save of that kind starts, and its tag."""
    old = tmp_path_factory.mktemp("old") / "root"
    make_old(old)

    def make(kind, folder):
        folder.mkdir()
        if kind == "first":
            return folder / "root", "t"
        return copy_of(old, folder / "root"), NEW_TAG if kind == "new tag" else OVERWRITE

    return make


KINDS = ["first", "new tag", "overwrite"]


def check_states(disk, folder, check):
    for number, state in enumerate(disk.states_after_power_loss()):
        path = folder / str(number)
        write_state(state, path)
        check(path / "root")


def check_old_or_new_after_power_loss(kind, tag, disk, calls, folder):
    """Runs through the save and looks at all states; at its end only the new checkpoint will do."""

    def check_during(root):
        if kind != "first":
            check_old_or_new(root, tag)
        elif (root / tag).exists():
            assert value_of(root, tag) == 2

    def check_at_end(root):
        assert value_of(root, tag) == 2

    for number, call in enumerate(calls):
        (folder / f"{number}").mkdir()
        disk.apply(call)
        check_states(disk, folder / f"{number}", check_during)
    (folder / "end").mkdir()
    check_states(disk, folder / "end", check_at_end)


@pytest.mark.parametrize("kind", KINDS)
def test_power_loss_at_any_moment_leaves_old_or_new(start, kind, tmp_path):
    root, tag = start(kind, tmp_path / "disk")
    disk = Disk(tmp_path / "disk")
    outcomes, calls = sabotaged_save(root, tag, tmp_path / "log")
    assert [outcome.error for outcome in outcomes] == ["", ""]

    check_old_or_new_after_power_loss(kind, tag, disk, calls, tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_power_loss_with_any_one_fsync_left_out_is_noticed_by_the_test_above(start, kind, tmp_path):
    root, tag = start(kind, tmp_path / "count")
    _, calls = sabotaged_save(root, tag, tmp_path / "log")
    syncs = [
        (rank, point)
        for rank in (0, 1)
        for point, call in enumerate(call for call in calls if call.rank == rank)
        if call.name == "fsync"
    ]
    assert len(syncs) >= 5

    for rank, point in syncs:
        here = tmp_path / f"{rank}-{point}"
        root, tag = start(kind, here)
        disk = Disk(here)
        outcomes, calls = sabotaged_save(
            root, tag, tmp_path / f"log{rank}-{point}", {rank: Sabotage(frozenset([point]), "skip")}
        )
        assert [outcome.error for outcome in outcomes] == ["", ""]
        states = tmp_path / f"states{rank}-{point}"
        states.mkdir()

        with pytest.raises((AssertionError, CheckpointError, UserWarning)):
            check_old_or_new_after_power_loss(kind, tag, disk, calls, states)
