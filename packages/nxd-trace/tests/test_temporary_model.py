"""The temporary folders of models whose process was killed are removed by the next process that makes one."""

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
    """A process with a folder, which looks as if it had been made long ago."""
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


def test_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_stays(tmp_path):
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
