"""The output folder of a run: one run at a time uses it, and all ranks see the same folder."""

import os
import secrets
import time
from pathlib import Path
from typing import IO

from nxd_ckpt import files
from nxd_state import all_gather_object, get_world_group

LOCK_FILE = ".lock"
_SECONDS_TO_APPEAR = 5.0  # network file systems show other hosts' writes late


def open_output(folder: Path) -> IO[str] | None:
    """Make the output folder, and lock it for as long as the returned file is open; only the first rank holds it.

    The operating system releases the lock when the process ends, however it ends.

    Raises:
        ValueError: another run holds it, it cannot be written, or it is another folder on some host; on every rank.
    """
    world = get_world_group()
    lock: IO[str] | None = None
    problem, mark = None, secrets.token_hex(8)
    if world.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = files.lock(str(folder / LOCK_FILE))
            lock = None if descriptor is None else os.fdopen(descriptor, "r+")
            (folder / LOCK_FILE).write_text(mark)
        except BlockingIOError:
            problem = f"another run is using {folder}; wait for it, or choose another output folder"
        except OSError as error:
            problem = f"output={folder} cannot be written: {error}"
    problem, mark = all_gather_object((problem, mark), world)[0]
    if problem is not None:
        raise ValueError(problem)
    sees = all_gather_object(_appears(folder / LOCK_FILE, mark), world)
    if not all(sees):
        others = ", ".join(str(rank) for rank, there in enumerate(sees) if not there)
        raise ValueError(
            f"output={folder} is not the same folder on all hosts: ranks {others} do not see what rank 0 wrote there; "
            "choose a folder on a file system that all hosts share"
        )
    return lock


def _appears(file: Path, text: str) -> bool:
    """Whether a file holds a text, now or after a short time."""
    give_up = time.monotonic() + _SECONDS_TO_APPEAR
    while True:
        try:
            if file.read_text() == text:
                return True
        except OSError:
            pass  # not there yet, or not at all
        if time.monotonic() > give_up:
            return False
        time.sleep(0.1)
