"""Incremental saves and deletions, killed at any system call or one in the midst of the other: all that is listed is
whole, and nothing is left behind for ever.
"""

import os
import warnings

import pytest
import torch
from nxd_ckpt import CheckpointError, delete, gc, list_checkpoints, open_checkpoint, save
from nxd_ckpt.testing import run_on_threads

from .forked_ranks import run_forked
from .power_loss import Disk, write_state
from .saves import NEW_TAG, OVERWRITE, SOME_OR_ALL, WORLD_SIZE, copy_of, sample
from .system_calls import WRITES, Sabotage, SystemCalls, calls_in

pytestmark = pytest.mark.sample(6)  # each takes its time


def state_of(rank, value):
    """`frozen` is the same in all saves."""
    return {f"frozen{rank}": torch.full((100,), 7.0), f"own{rank}": torch.full((50,), float(value))}


def save_value(root, tag, value, ranks):
    save(
        root,
        tag,
        state_of(ranks.rank, value),
        step=value,
        objects=value,
        overwrite=True,
        incremental=True,
        process_group=ranks,
    )


def values(root):
    """The value of each checkpoint that is listed; each is read as a whole."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of damaged manifests
        for info in list_checkpoints(root):
            checkpoint = open_checkpoint(root, info.tag)
            found[info.tag] = checkpoint.objects
            assert checkpoint.damage() == []
            for rank in range(WORLD_SIZE):
                for name, expected in state_of(rank, checkpoint.objects).items():
                    assert torch.equal(checkpoint.read(name), expected)
    return found


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """Checkpoint "t" of value 1, whose frozen tensors lie with the deleted "s"."""
    root = tmp_path_factory.mktemp("old") / "root"
    for tag, value in (("s", 0), ("t", 1)):
        run_on_threads(lambda ranks, tag=tag, value=value: save_value(root, tag, value, ranks), WORLD_SIZE)
    delete(root, "s")
    return root


class Interruption(SystemCalls):
    """Has something done before one call, instead of dying at it."""

    def __init__(self, log, point, do):
        self._do = do
        super().__init__(0, log, Sabotage(frozenset([point]), "before"))

    def _die(self):
        self._do()


def logged(action, log):
    """The calls that one process makes for something."""

    def main(_):
        SystemCalls(0, log, None)
        action()

    (outcome,) = run_forked(main, 1)
    assert outcome.error == ""
    return calls_in(log)


def check_end(root):
    """All that is there can be deleted, and then nothing is left."""
    gc(root)
    values(root)
    for tag in values(root):
        delete(root, tag)
    gc(root)
    assert gc(root) == []
    assert {name for name in os.listdir(root) if not name.startswith((".", "LATEST"))} == set()


@pytest.mark.pairs
@SOME_OR_ALL
@pytest.mark.parametrize("tag", [NEW_TAG, OVERWRITE], ids=["new tag", "overwrite"])
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("how", ["before", "halfway", "after"])
def test_incremental_save_killed_at_any_call_leaves_old_or_new(old, tag, rank, how, every, tmp_path):
    def run(root, log, sabotage):
        def rank_main(ranks):
            SystemCalls(ranks.rank, log, sabotage.get(ranks.rank))
            save_value(root, tag, 2, ranks)

        return run_forked(rank_main, WORLD_SIZE)

    run(copy_of(old, tmp_path / "count"), tmp_path / "log", {})
    assert values(tmp_path / "count")[tag] == 2
    calls = [call for call in calls_in(tmp_path / "log") if call.rank == rank]
    if rank == 0:
        assert any(call.path.endswith(".holds") for call in calls)
    points = [number for number, call in enumerate(calls) if how != "halfway" or call.name in WRITES]
    for point in sample(points, every, f"{tag} {rank} {how}"):
        root = copy_of(old, tmp_path / str(point))
        run(root, tmp_path / f"log{point}", {rank: Sabotage(frozenset([point]), how)})

        assert values(root) in ([{"t": 1}, {"t": 2}] if tag == "t" else [{"t": 1}, {"t": 1, "u": 2}])
        run_on_threads(lambda ranks, root=root: save_value(root, "v", 3, ranks), WORLD_SIZE)
        assert values(root)["v"] == 3
        check_end(root)


@pytest.fixture(scope="module")
def chain(old, tmp_path_factory):
    """Checkpoints "t", and "u", which references some of its data."""
    root = copy_of(old, tmp_path_factory.mktemp("chain") / "root")
    run_on_threads(lambda ranks: save_value(root, "u", 2, ranks), WORLD_SIZE)
    run_on_threads(lambda ranks: save_value(root, "v", 2, ranks), WORLD_SIZE)  # writes nothing
    return root


@pytest.mark.sample(4)
@pytest.mark.parametrize("tag", ["t", "u", "v"])
@pytest.mark.parametrize("how", ["before", "after"])
def test_deletion_killed_at_any_call_leaves_the_others_whole(chain, tag, how, tmp_path):
    count = copy_of(chain, tmp_path / "count")
    calls = logged(lambda: delete(count, tag), tmp_path / "log")
    for point in range(len(calls)):
        root = copy_of(chain, tmp_path / str(point))

        def rank_main(ranks, root=root, point=point):
            SystemCalls(0, tmp_path / f"log{point}", Sabotage(frozenset([point]), how))
            delete(root, tag)

        run_forked(rank_main, 1)

        left = values(root)
        assert left.keys() | {tag} == {"t", "u", "v"}
        gc(root)
        assert values(root) == left
        check_end(root)


@pytest.mark.parametrize("tag", ["t", "u", "v"])
def test_deletion_power_loss_at_any_moment_leaves_the_others_whole(chain, tag, tmp_path):
    (tmp_path / "disk").mkdir()
    root = copy_of(chain, tmp_path / "disk" / "root")
    disk = Disk(tmp_path / "disk")
    for number, call in enumerate(logged(lambda: delete(root, tag), tmp_path / "log")):
        disk.apply(call)
        for index, state in enumerate(disk.states_after_power_loss()):
            write_state(state, tmp_path / f"{number}-{index}")
            assert values(tmp_path / f"{number}-{index}" / "root").keys() | {tag} == {"t", "u", "v"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("tag", [NEW_TAG, OVERWRITE], ids=["new tag", "overwrite"])
def test_incremental_save_power_loss_at_any_moment_leaves_old_or_new(old, tag, tmp_path):
    (tmp_path / "disk").mkdir()
    root = copy_of(old, tmp_path / "disk" / "root")
    disk = Disk(tmp_path / "disk")

    def rank_main(ranks):
        SystemCalls(ranks.rank, tmp_path / "log", None)
        save_value(root, tag, 2, ranks)

    run_forked(rank_main, WORLD_SIZE)
    for number, call in enumerate(calls_in(tmp_path / "log")):
        disk.apply(call)
        for index, state in enumerate(disk.states_after_power_loss()):
            write_state(state, tmp_path / f"{number}-{index}")
            assert values(tmp_path / f"{number}-{index}" / "root") in (
                [{"t": 1}, {"t": 2}] if tag == "t" else [{"t": 1}, {"t": 1, "u": 2}]
            )


def both(root, log, first, second, point):
    """Does the first, and the second in the midst of it; returns the error of either, if there is one."""
    errors = {}

    def do(name, action):
        try:
            action()
        except CheckpointError as error:
            errors[name] = str(error)

    def main(_):
        Interruption(log, point, lambda: do("second", second))
        do("first", first)
        return errors

    (outcome,) = run_forked(main, 1)
    assert outcome.error == ""
    return outcome.value


def save_alone(root):
    state = state_of(0, 2) | state_of(1, 2)
    save(root, "u", state, step=2, objects=2, incremental=True)


def test_deletion_of_the_base_at_any_call_of_a_save_leaves_it_whole_or_refused(old, tmp_path):
    count = copy_of(old, tmp_path / "count")
    calls = logged(lambda: save_alone(count), tmp_path / "log")
    ends = set()
    for point in range(len(calls)):
        root = copy_of(old, tmp_path / str(point))
        errors = both(
            root,
            tmp_path / f"log{point}",
            lambda root=root: save_alone(root),
            lambda root=root: delete(root, "t"),
            point,
        )

        assert "second" not in errors
        if "first" in errors:
            assert "checkpoint 't', whose data this incremental save references, has changed" in errors["first"]
        assert values(root) == ({} if "first" in errors else {"u": 2})
        ends.add("first" in errors)
        check_end(root)
    assert ends == {True, False}


def test_save_at_any_call_of_the_deletion_of_its_base_is_whole_or_refused(old, tmp_path):
    count = copy_of(old, tmp_path / "count")
    calls = logged(lambda: delete(count, "t"), tmp_path / "log")
    for point in range(len(calls)):
        root = copy_of(old, tmp_path / str(point))
        errors = both(
            root,
            tmp_path / f"log{point}",
            lambda root=root: delete(root, "t"),
            lambda root=root: save_alone(root),
            point,
        )

        assert errors == {}
        assert values(root) == {"u": 2}
        check_end(root)
