"""The next process that creates a temporary folder removes those of killed processes."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import tempfile
from nxd_trace.model import TemporaryModelFolder
tempfile.tempdir = sys.argv[1]
folder = TemporaryModelFolder()
print(folder.name, flush=True)
input()
"""


def start(tmp: Path) -> "tuple[subprocess.Popen[str], Path]":
    """Start a process with a folder that looks old."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    (folder / "weights").write_bytes(bytes(100))
    os.utime(folder, (0, 0))
    return process, folder


def test_next_process_removes_the_folder_of_a_killed_one_and_not_that_of_a_living_one(tmp_path):
    killed, of_killed = start(tmp_path)
    living, of_living = start(tmp_path)
    killed.kill()
    killed.communicate()

    last, of_last = start(tmp_path)

    assert not of_killed.exists()
    assert (of_living / "weights").exists()
    for process in (living, last):
        process.communicate("\n")
    assert not of_living.exists()
    assert not of_last.exists()
