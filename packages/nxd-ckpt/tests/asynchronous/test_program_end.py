"""Programs that end while a save is under way finish it. Those that are killed are in `test_writer_process.py`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from nxd_ckpt import open_checkpoint

PROGRAM = Path(__file__).with_name("program.py")
WAYS = ["exception", "SIGTERM", "failure"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory, deadline):
    """Each way's folder, exit status, and what was printed; all ran at the same time."""
    runs = [(way, []) for way in WAYS] + [(way, [rank]) for way in ("process group", "fork") for rank in "01"]
    folders = {way: tmp_path_factory.mktemp(way.replace(" ", "_")) for way, _ in runs}
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folders[way]), way, *rank],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for way, rank in runs
    ]
    ended = {}
    for (way, _), program in zip(runs, started, strict=True):
        printed = program.communicate(timeout=deadline(120))
        ended[way] = (folders[way] / "root", program.returncode, printed)
    return ended


def value_of(root):
    (value,) = open_checkpoint(root, "t").read("w").unique().tolist()
    return value


@pytest.mark.parametrize(("way", "status"), [("exception", 3), ("SIGTERM", -signal.SIGTERM), ("process group", 0)])
def test_program_that_ends_without_waiting_finishes_its_save(ended, way, status):
    root, returncode, (_, errors) = ended[way]

    assert returncode == status, errors
    assert value_of(root) == 2


def test_child_forked_from_a_rank_is_refused_and_the_rank_goes_on(ended):
    root, returncode, (output, errors) = ended["fork"]

    assert returncode == 0, errors
    assert "was forked from a rank and cannot act for it: save and load in the rank itself" in output
    assert value_of(root) == 2


def test_program_that_never_heard_of_a_failure_prints_it_at_the_end(ended):
    _, returncode, (_, errors) = ended["failure"]

    assert returncode == 0
    assert "nxd_ckpt: saving checkpoint 'folder' in the background has failed: " in errors
    assert "exists and is not a checkpoint" in errors


def test_writer_process_does_not_run_the_main_module_again(ended):
    for _, _, (output, _) in ended.values():
        assert output.count("main module\n") == 1  # the process group may print lines of its own
