"""When something goes wrong during a run: every rank ends, the cause is said first, and no checkpoint is broken."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nxd_ckpt
import pytest
from nxd_testing import deadline, run_torchrun

PROGRAMS = Path(__file__).parent / "programs"


def processes_with(marker: str) -> list[int]:
    """Processes whose environment holds `marker`: what a run has started, and what is left of it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    give_up = time.monotonic() + deadline(seconds)
    while not condition():
        assert time.monotonic() < give_up, "it did not come about in time"
        time.sleep(0.05)


def test_train_rank_that_raises_ends_all_ranks_with_its_traceback_first(tiny, tmp_path):
    result = run_torchrun(
        [
            str(PROGRAMS / "train_with_failing_rank.py"),
            "train",
            *tiny,
            f"output={tmp_path / 'run'}",
            f"data.path={tmp_path / 'text'}",
        ],
        2,
        timeout=deadline(120),
    )

    assert result.returncode != 0
    assert "RuntimeError: made to fail in step 3" in result.stderr
    cause = result.stderr.index("rank 1 failed:")
    assert "rank 0 failed:" not in result.stderr[:cause]


@pytest.mark.sample(1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("ranks", [[], ["--nproc", "2"]], ids=["one process", "two ranks"])
def test_train_signal_saves_and_leaves_no_process(tiny, tmp_path, signal_number, ranks):
    marker = f"NXD_TEST_MARKER={tmp_path.name}-{os.getpid()}"
    name, value = marker.split("=")
    long_run = [*tiny, "train.steps=100000", "train.eval_every=0", "checkpoint.save_every=0"]
    with subprocess.Popen(
        [sys.executable, "-m", "nxd_cli", "train", *ranks, *long_run],
        cwd=tmp_path,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {name: value},
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step"):
                break
        process.send_signal(signal_number)
        errors = process.stderr.read()
        process.wait(timeout=deadline(60))

    assert process.returncode == 143, errors
    assert errors.count(": stopping after the current step, with a checkpoint; a second signal ends without one\n") == 1
    newest = nxd_ckpt.latest(tmp_path / "run/checkpoints")
    assert newest is not None
    assert f"saved run/checkpoints/{newest.tag}" in errors
    assert errors.endswith(f"to resume: {shlex.join(['nxd', 'train', *ranks, *long_run])}\n")
    checkpoint = nxd_ckpt.open_checkpoint(tmp_path / "run/checkpoints")
    assert checkpoint.read("model.norm.weight").shape == (32,)
    assert processes_with(marker) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process is not told of its parent's death")
def test_train_with_a_killed_launcher_leaves_no_process_and_can_go_on(tiny, tmp_path, fresh_python, nxd):
    marker = f"NXD_TEST_MARKER={tmp_path.name}-{os.getpid()}"
    name, value = marker.split("=")
    # Without saves: these use the launcher's store, and fail when that is gone.
    long_run = ["train", "--nproc", "2", *tiny, "train.steps=100000", "train.eval_every=0", "checkpoint.save_every=0"]
    assert nxd(*long_run, "train.stop_after=1").returncode == 0
    said = tmp_path / "errors.txt"  # no pipe: its end would stop the ranks, too
    with (
        said.open("w") as errors,
        subprocess.Popen(
            [fresh_python, "-m", "nxd_cli", *long_run],
            cwd=tmp_path,
            stderr=errors,
            stdout=subprocess.DEVNULL,
            env=os.environ | {name: value},
        ) as process,
    ):
        wait_until(lambda: "\nstep" in said.read_text(), 120)
        assert len(processes_with(marker)) > 2
        process.kill()
    try:
        wait_until(lambda: not processes_with(marker), 30)
    finally:
        for pid in processes_with(marker):
            os.kill(pid, signal.SIGKILL)

    resumed = nxd(*long_run, "train.stop_after=2")
    assert resumed.returncode == 0, resumed.stderr
