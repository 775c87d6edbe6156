"""A save that is killed or fails at any system call leaves the old checkpoint or the new one, and a rerun succeeds."""

import errno
import os
import signal

import pytest
from nxd_ckpt import list_checkpoints

from .saves import (
    NEW_TAG,
    OVERWRITE,
    SOME_OR_ALL,
    WORLD_SIZE,
    check_old_or_new,
    copy_of,
    make_old,
    sabotaged_save,
    sample,
    save_again,
    value_of,
)
from .system_calls import WRITES, Sabotage, text_of

TIDYING_UP = {"unlink", "rmdir", "remove"}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    root = tmp_path_factory.mktemp("old") / "root"
    make_old(root)
    return root


@pytest.fixture(scope="module", params=[NEW_TAG, OVERWRITE], ids=["new tag", "overwrite"])
def tag(request):
    return request.param


@pytest.fixture(scope="module")
def calls(old, tag, tmp_path_factory):
    """What the ranks do when nothing goes wrong."""
    folder = tmp_path_factory.mktemp("calls")
    outcomes, calls = sabotaged_save(copy_of(old, folder / "root"), tag, folder / "log")
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert value_of(folder / "root", tag) == 2
    return calls


def names(calls, rank):
    return [call.name for call in calls if call.rank == rank]


def check_rerun(root, tag):
    save_again(root, tag, 3)
    assert value_of(root, tag) == 3
    assert os.listdir(root / ".staging") == ["lock"]
    assert len(list((root / tag / "data").iterdir())) == WORLD_SIZE


def test_save_by_several_ranks_makes_the_calls_that_are_expected(calls, tag):
    """So that a test below that runs over all calls cannot silently run over none."""
    assert names(calls, 1).count("fsync") == 1
    assert "write" in names(calls, 1)
    assert names(calls, 0).count("fsync") == (5 if tag == NEW_TAG else 4)
    assert {"mkdir", "open", "write", "rename" if tag == NEW_TAG else "replace"} <= set(names(calls, 0))


@pytest.mark.sample(4)
@SOME_OR_ALL
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("how", ["before", "halfway", "after"])
def test_save_killed_at_any_call_leaves_old_or_new_and_the_others_say_who_is_gone(
    old, tag, calls, rank, how, every, tmp_path
):
    points = [number for number, name in enumerate(names(calls, rank)) if how != "halfway" or name in WRITES]
    assert points

    for point in sample(points, every, f"{tag} {rank} {how}"):
        root = copy_of(old, tmp_path / str(point))
        sabotage = {rank: Sabotage(frozenset([point]), how)}
        outcomes, _ = sabotaged_save(root, tag, tmp_path / f"log{point}", sabotage)

        assert outcomes[rank].signal == signal.SIGKILL
        if outcomes[1 - rank].error:
            assert outcomes[1 - rank].error == f"CheckpointError: rank {rank} of {WORLD_SIZE} is gone"
        else:  # killed while tidying up, when all ranks knew of the commit
            assert value_of(root, tag) == 2
        check_old_or_new(root, tag)
        check_rerun(root, tag)


@SOME_OR_ALL
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_save_failing_at_any_call_raises_the_same_on_all_ranks_and_leaves_old_or_new(
    old, tag, calls, rank, error, every, tmp_path
):
    called = names(calls, rank)
    for point in sample(list(range(len(called))), every, f"{tag} {rank} {error}"):
        root = copy_of(old, tmp_path / str(point))
        sabotage = {rank: Sabotage(frozenset([point]), error)}
        outcomes, _ = sabotaged_save(root, tag, tmp_path / f"log{point}", sabotage)

        errors = [outcome.error for outcome in outcomes]
        if errors == ["", ""]:  # only tidying up, and leaving the hint LATEST, may fail without a word
            assert value_of(root, tag) == 2
            assert called[point] in TIDYING_UP or "LATEST" in str([call for call in calls if call.rank == rank][point])
        else:
            assert errors[0] == errors[1]
            assert f"failed on 1 of 2 ranks\n  rank {rank}: OSError: {text_of(error)}" in errors[0]
            assert os.listdir(root / ".staging") in (["lock"], [])
        check_old_or_new(root, tag)
        check_rerun(root, tag)


@SOME_OR_ALL
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_save_first_into_an_absent_folder_killed_at_any_call_leaves_none_or_new(rank, every, tmp_path):
    _, calls = sabotaged_save(tmp_path / "count" / "root", "t", tmp_path / "log")

    for point in sample(list(range(len(names(calls, rank)))), every, f"first {rank}"):
        root = tmp_path / str(point) / "root"
        sabotage = {rank: Sabotage(frozenset([point]), "before")}
        outcomes, _ = sabotaged_save(root, "t", tmp_path / f"log{point}", sabotage)

        assert outcomes[rank].signal == signal.SIGKILL
        assert [value_of(root, info.tag) for info in list_checkpoints(root)] in ([], [2])
        check_rerun(root, "t")
