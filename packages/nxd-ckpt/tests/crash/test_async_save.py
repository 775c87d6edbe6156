"""A background save whose process or writer is killed or fails at any system call leaves the old or the new one."""

import errno
import json
import os
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch
from nxd_ckpt import CheckpointError, async_save, list_checkpoints, open_checkpoint, save

from .forked_ranks import run_forked
from .power_loss import Disk, write_state
from .saves import NEW_TAG, OVERWRITE, SOME_OR_ALL, copy_of, sample
from .system_calls import WRITES, Sabotage, SystemCalls, calls_in, text_of

MAIN, WRITER = 0, 1
NOTHING = Sabotage(frozenset(), "before")


def state_of(value):
    return {"w": torch.full((100,), float(value))}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    root = tmp_path_factory.mktemp("old") / "root"
    save(root, "t", state_of(1), step=1)
    return root


@pytest.fixture(scope="module")
def interpreter(fresh_python, tmp_path_factory):
    """A program that is started in place of Python."""
    path = tmp_path_factory.mktemp("bin") / "python"
    path.write_text(f'#!/bin/sh\nexec "{fresh_python}" "{Path(__file__).with_name("counted_python.py")}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def sabotaged_save(root, tag, log, interpreter, main=NOTHING, writer=NOTHING):
    """Saves value 2 in the background and waits for it; returns how the process ended, and all calls."""

    def process(_):
        sys.executable = interpreter
        settings = {"log": str(log), "points": sorted(writer.points), "how": writer.how}
        os.environ["COUNTED_CALLS"] = json.dumps(settings)
        SystemCalls(MAIN, log, main)
        state = state_of(2)
        handle = async_save(root, tag, state, step=2, overwrite=True, timeout=20.0)
        state["w"].fill_(77.0)
        handle.wait()

    (outcome,) = run_forked(process, 1)
    return outcome, calls_in(log)


def values(root):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of damaged manifests
        tags = [info.tag for info in list_checkpoints(root)]
    found = {tag: open_checkpoint(root, tag).read("w").unique().tolist() for tag in tags}
    return {tag: value for tag, (value,) in found.items()}


@pytest.fixture(scope="module", params=[NEW_TAG, OVERWRITE], ids=["new tag", "overwrite"])
def tag(request):
    return request.param


@pytest.fixture(scope="module")
def calls(old, tag, interpreter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    outcome, calls = sabotaged_save(copy_of(old, folder / "root"), tag, folder / "log", interpreter)
    assert outcome.error == ""
    assert values(folder / "root")[tag] == 2
    return calls


def sabotages(calls, who, how, every):
    names = [call.name for call in calls if call.rank == who]
    points = [number for number, name in enumerate(names) if how != "halfway" or name in WRITES]
    assert points
    chosen = sample(points, every, f"{names} {how}")
    return [(point, {("main", "writer")[who]: Sabotage(frozenset([point]), how)}) for point in chosen]


def check(root, tag):
    assert values(root) in ([{"t": 1}, {"t": 2}] if tag == "t" else [{"t": 1}, {"t": 1, "u": 2}])
    save(root, tag, state_of(3), step=3, overwrite=True)
    assert values(root)[tag] == 3
    assert os.listdir(root / ".staging") == ["lock"]


@pytest.mark.sample(3)
@SOME_OR_ALL
@pytest.mark.parametrize("how", ["before", "halfway", "after"])
def test_async_save_whose_process_is_killed_at_any_call_leaves_old_or_new(
    old, tag, calls, interpreter, how, every, tmp_path
):
    for point, sabotage in sabotages(calls, MAIN, how, every):
        root = copy_of(old, tmp_path / str(point))
        outcome, _ = sabotaged_save(root, tag, tmp_path / f"log{point}", interpreter, **sabotage)

        assert outcome.signal == signal.SIGKILL
        check(root, tag)


@pytest.mark.sample(4)
@SOME_OR_ALL
@pytest.mark.parametrize("how", ["before", "halfway", "after", errno.EIO, errno.ENOSPC])
def test_async_save_whose_writer_is_killed_or_fails_at_any_call_leaves_the_old_one_and_says_so(
    old, tag, calls, interpreter, how, every, tmp_path
):
    for point, sabotage in sabotages(calls, WRITER, how, every):
        root = copy_of(old, tmp_path / str(point))
        outcome, _ = sabotaged_save(root, tag, tmp_path / f"log{point}", interpreter, **sabotage)

        assert "CheckpointError: saving checkpoint" in outcome.error
        assert (text_of(how) if isinstance(how, int) else "writer") in outcome.error
        assert values(root) == {"t": 1}
        check(root, tag)


@SOME_OR_ALL
def test_async_save_that_fails_at_any_call_says_so_and_leaves_old_or_new(old, tag, calls, interpreter, every, tmp_path):
    for point, sabotage in sabotages(calls, MAIN, errno.EIO, every):
        root = copy_of(old, tmp_path / str(point))
        outcome, _ = sabotaged_save(root, tag, tmp_path / f"log{point}", interpreter, **sabotage)

        if outcome.error:
            assert text_of(errno.EIO) in outcome.error
        else:
            assert values(root)[tag] == 2
        check(root, tag)


def check_power_loss(old, tag, interpreter, folder, writer):
    """Loses power at each moment of a background save, and after it, when only the new one will do."""
    (folder / "disk").mkdir(parents=True)
    root = copy_of(old, folder / "disk" / "root")
    disk = Disk(folder / "disk")
    outcome, calls = sabotaged_save(root, tag, folder / "log", interpreter, writer=writer)
    assert outcome.error == ""
    for number, call in enumerate(calls):
        disk.apply(call)
        last = number == len(calls) - 1
        for index, state in enumerate(disk.states_after_power_loss()):
            found = folder / f"{number}-{index}"
            write_state(state, found)
            after = values(found / "root")
            assert after.get(tag) == 2 if last else after in ([{"t": 1}, {"t": 2}, {"t": 1, "u": 2}])


def test_async_save_power_loss_at_any_moment_leaves_old_or_new(old, tag, interpreter, tmp_path):
    check_power_loss(old, tag, interpreter, tmp_path, NOTHING)


def test_async_save_power_loss_with_the_fsync_of_the_writer_left_out_is_noticed_by_the_test_above(
    old, tag, calls, interpreter, tmp_path
):
    (sync,) = [
        number for number, call in enumerate(call for call in calls if call.rank == WRITER) if call.name == "fsync"
    ]

    with pytest.raises((AssertionError, CheckpointError, UserWarning)):
        check_power_loss(old, tag, interpreter, tmp_path, Sabotage(frozenset([sync]), "skip"))
