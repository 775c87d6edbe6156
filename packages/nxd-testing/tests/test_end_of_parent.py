"""No worker process outlives the process whose pool it belongs to."""

import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest
from nxd_testing import deadline

# Each rank holds the writing end of a pipe: its reader sees the end of file when the last of them is gone.
PARENT = """
    import os, signal, sys, time
    from nxd_testing import run_on_ranks

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits "ignored"

    def hold(path, seconds):
        os.write(os.open(path, os.O_WRONLY), b".")
        time.sleep(seconds)

    run_on_ranks(hold, 2, sys.argv[1], float(sys.argv[2]), timeout=1000.0)
"""


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "held_by_the_ranks"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, reader
    os.close(reader)


def read(reader: int, size: int) -> bytes:
    """Reads `size` bytes, fewer where all writers are gone."""
    received = b""
    while len(received) < size:
        ready, _, _ = select.select([reader], [], [], deadline(60))
        assert ready, f"{received!r} received, and the ranks still hold the pipe"
        chunk = os.read(reader, size - len(received))
        if not chunk:
            break
        received += chunk
    return received


@pytest.fixture
def start_parent():
    parents = []

    def start(path, seconds: float) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", textwrap.dedent(PARENT), str(path), str(seconds)]
        parents.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return parents[-1]

    yield start
    for parent in parents:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_end_of_parent_by_signal_during_a_job_ends_the_workers(pipe, start_parent, signal_number):
    path, reader = pipe
    # Opened here as well while the ranks start, or an early reader would see the end of file.
    own_writer = os.open(path, os.O_WRONLY)
    parent = start_parent(path, seconds=1000)
    assert read(reader, 2) == b".."
    os.close(own_writer)

    parent.send_signal(signal_number)

    _, stderr = parent.communicate(timeout=deadline(60))
    assert read(reader, 1) == b""
    assert ("KeyboardInterrupt" in stderr) == (signal_number == signal.SIGINT)


def test_end_of_parent_by_its_own_exit_ends_the_workers(pipe, start_parent):
    path, reader = pipe
    own_writer = os.open(path, os.O_WRONLY)
    parent = start_parent(path, seconds=0)
    assert read(reader, 2) == b".."
    os.close(own_writer)

    _, stderr = parent.communicate(timeout=deadline(60))

    assert (parent.returncode, stderr) == (0, "")
    assert read(reader, 1) == b""
