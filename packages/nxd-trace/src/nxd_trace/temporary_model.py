"""The temporary folder of an unsaved model: weights and programs may be large, so it must not outlive its process.

A process that is killed cannot remove its folder. So it holds a lock on it, which ends with the process, and the next
model removes folders whose locks are free.
"""

import fcntl
import os
import shutil
import stat
import time
import weakref
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

_PREFIX = "nxd_trace_model_"
_SECONDS_TO_LOCK = 60.0  # a younger folder may be about to be locked


class TemporaryModelFolder(TemporaryDirectory[str]):
    """A new folder, removed with this object, or by a later one if this process is killed."""

    def __init__(self) -> None:
        _remove_left_over()
        super().__init__(prefix=_PREFIX)
        descriptor = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
        self._unlock = weakref.finalize(self, os.close, descriptor)
        with suppress(OSError):  # a file system without locks: then no other process can lock it either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def cleanup(self) -> None:
        """Remove the folder now."""
        self._unlock()
        super().cleanup()


def _remove_left_over() -> None:
    for folder in Path(gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # locked, another user's, or gone by now
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if not is_own or time.time() - status.st_mtime < _SECONDS_TO_LOCK:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
