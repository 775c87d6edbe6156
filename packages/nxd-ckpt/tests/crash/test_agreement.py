"""Each point at which a save waits for all ranks is needed: without it they do not all raise the same error.

The three scenarios below hold for the code as it is; with any one point left out, one of them does not.
"""

import errno

import nxd_ckpt.saving
import pytest
from nxd_ckpt import CheckpointError, async_save, load, save

from .forked_ranks import run_forked
from .saves import WORLD_SIZE, copy_of, make_old, save_all, state_of, value_of
from .system_calls import Sabotage, SystemCalls

POINTS = ["begin", "write", "commit"]


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    root = tmp_path_factory.mktemp("old") / "root"
    make_old(root)
    return root


def leave_out(point: str) -> None:
    """Makes the ranks of this process go on at one point as if all were well, without hearing of one another."""
    on_rank_zero, gather = nxd_ckpt.saving.on_rank_zero, nxd_ckpt.saving.gather_from_every_rank
    points = iter(["begin", "commit"])

    def alone(coordinator, doing, action):
        if next(points) != point:
            return on_rank_zero(coordinator, doing, action)
        return action() if coordinator.rank == 0 else None

    def deaf(coordinator, doing, action, **options):
        try:
            return gather(coordinator, doing, action, **options)
        except CheckpointError:
            return [None] * coordinator.world_size

    nxd_ckpt.saving.on_rank_zero = alone
    if point == "write":
        nxd_ckpt.saving.gather_from_every_rank = deaf


def outcomes_of(scenario, root, log, point):
    """Errors of the ranks in a scenario, with one point of agreement left out."""

    def rank_main(ranks):
        leave_out(point)
        if scenario == "folder is no checkpoint":
            (root / "folder").mkdir(exist_ok=True)
            save(root, "folder", state_of(ranks.rank, 2), process_group=ranks)
        elif scenario == "rank 1 cannot write":
            sabotage = Sabotage(frozenset([1]), errno.ENOSPC) if ranks.rank == 1 else None
            SystemCalls(ranks.rank, log, sabotage, only=("write",))
            save_all(root, "t", 2, ranks)
        else:
            SystemCalls(ranks.rank, log, Sabotage(frozenset([0]), errno.EIO), only=("replace",))
            save_all(root, "t", 2, ranks)

    return [outcome.error for outcome in run_forked(rank_main, WORLD_SIZE)]


SCENARIOS = {
    "folder is no checkpoint": r"(?s)CheckpointError: .*rank 0: .*folder exists and is not a checkpoint",
    "rank 1 cannot write": r"CheckpointError: .*failed on 1 of 2 ranks\n  rank 1: OSError: .*No space left",
    "rank 0 cannot commit": r"CheckpointError: .*failed on 1 of 2 ranks\n  rank 0: OSError: .*Input/output error",
}


def check(scenario, old, folder, point):
    folder.mkdir()
    errors = outcomes_of(scenario, copy_of(old, folder / "root"), folder / "log", point)
    assert errors[0] == errors[1]
    with pytest.raises(RuntimeError, match=SCENARIOS[scenario]):
        raise RuntimeError(errors[0])
    assert value_of(folder / "root", "t") == 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_save_that_fails_raises_the_same_on_all_ranks(scenario, old, tmp_path):
    check(scenario, old, tmp_path / "here", "none")


@pytest.mark.parametrize("point", POINTS)
def test_save_with_a_point_of_agreement_left_out_fails_the_test_above(point, old, tmp_path):
    red = []
    for number, scenario in enumerate(SCENARIOS):
        try:
            check(scenario, old, tmp_path / str(number), point)
        except (AssertionError, CheckpointError):
            red.append(scenario)

    assert red


@pytest.mark.parametrize("call", [save, async_save, load])
def test_memory_of_several_processes_is_refused_on_all_ranks(call):
    def rank_main(ranks):
        state = {"into": {}} if call is load else {"state": {}}
        call("memory://runs", "t", **state, process_group=ranks)

    for outcome in run_forked(rank_main, 2):
        assert outcome.error == (
            "ValueError: path='memory://runs' is the memory of one process, but the 2 ranks run in 2 processes; use a "
            "folder that all of them can access, or an object store URL"
        )
