"""The folder for checkpoints: there, writable, with room, and with the renames that make a checkpoint complete."""

import os
import shutil
import tempfile
import time
from pathlib import Path

from nxd_trainer.doctor.finding import Finding, ok, warning, wrong

ENOUGH_BYTES = 10 << 30
MOST_SKEW_SECONDS = 5.0


def check_folder(folder: str | Path, free: int | None = None) -> Finding:
    """Write, flush, rename and remove a file there.

    Args:
        folder: need not exist yet, if it can be made; of an object store, by its URL, it is not looked at.
        free: bytes on its disk; asked for if None.
    """
    name = f"folder {folder}"
    if "://" in str(folder):
        return warning(name, "is in an object store, which is not looked at", f"try it: nxd-ckpt list {folder}")
    path = Path(folder).absolute()
    place = next(it for it in (path, *path.parents) if os.path.lexists(it))
    if not place.is_dir():
        return wrong(name, f"{place} is no folder", "choose a folder")
    try:
        with tempfile.TemporaryDirectory(prefix=".nxd-doctor-", dir=place) as trial:
            Path(trial, path.relative_to(place)).mkdir(parents=True, exist_ok=True)
            first, second = Path(trial, "first"), Path(trial, "second")
            with first.open("wb") as file:
                file.write(b"written by nxd doctor")
                os.fsync(file.fileno())
            os.replace(first, second)
            skew = second.stat().st_mtime - time.time()
    except OSError as error:
        return wrong(name, f"cannot be written: {error}", "give this user the right to write, or choose another folder")
    free = shutil.disk_usage(place).free if free is None else free
    if abs(skew) > MOST_SKEW_SECONDS:
        found = f"its file server's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this host's"
        return warning(name, found, "keep both in step with a time server: timedatectl set-ntp true")
    found = f"writable, {free / (1 << 30):.1f} GiB free"
    if free < ENOUGH_BYTES:
        mend = "make room: a checkpoint needs up to 16 bytes for each parameter, and the one before stays until then"
        return warning(name, found, mend)
    return ok(name, found)
