"""One run at a time in an output folder: two would overwrite each other's metrics and checkpoints."""

import fcntl
from pathlib import Path
from typing import IO

from nxd_state import all_gather_object, get_world_group


def lock_output(folder: Path) -> IO[str] | None:
    """Lock an output folder for as long as the returned file is open; only the first rank holds one.

    The system lets go of the lock when the process ends, however it ends.

    Raises:
        ValueError: another run holds it; on every rank.
    """
    lock: IO[str] | None = None
    problem = None
    if get_world_group().rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"another run is at work in {folder}; wait for it, or choose another output folder"
        except OSError as error:
            problem = f"output={folder} cannot be written: {error}"
    problem = all_gather_object(problem, get_world_group())[0]
    if problem is not None:
        raise ValueError(problem)
    return lock
