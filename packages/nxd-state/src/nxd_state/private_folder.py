"""Folders that only this user can write, for files that are executed, such as compiled code.

If other users can guess a name in a shared place, they can create it first, and their files would run as this user.
"""

import atexit
import os
import shutil
import stat
import tempfile
from pathlib import Path

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # torch's default is a name in the shared temporary folder
_NAMED_BY_VARIABLES = (_COMPILED, "TRITON_CACHE_DIR")


def private_folder(path: Path) -> Path:
    """Create a folder that only this user can write, or check that an existing one is.

    Returns:
        The folder, as an absolute path without links.

    Raises:
        PermissionError: another user, except root, can write to it or put another folder in its place.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.resolve()
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {found.st_uid}, whose files would run here; use a new folder")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write to {path}, and their files would run here; use a new folder")
    for above in folder.parents:
        if _can_be_exchanged_in(above.stat()):
            raise PermissionError(
                f"other users can put their own folder in place of {path}, as they can write to {above}; "
                "use a folder below your home"
            )
    return folder


def keep_compiled_code_private() -> None:
    """Make torch's compiler keep compiled code in a private folder; call it before anything is compiled.

    A folder that a variable names is checked and used. Otherwise it is one in the user's cache folder; where that is
    not possible, one that is removed when this process ends. It becomes `TORCHINDUCTOR_CACHE_DIR` of this process.

    Raises:
        PermissionError: a variable names a folder in which others could put code.
    """
    for name in _NAMED_BY_VARIABLES:
        if os.environ.get(name):
            try:
                private_folder(Path(os.environ[name]))
            except PermissionError as error:
                raise PermissionError(f"{name}: {error}, or unset {name}") from error
    if os.environ.get(_COMPILED):
        return
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = private_folder(cache / "nxd" / "inductor")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is read-only")
    except (OSError, RuntimeError):  # there is no home, or it is read-only or another user's
        folder = Path(tempfile.mkdtemp(prefix="nxd-inductor-"))
        atexit.register(_remove_own, folder, os.getpid())
    os.environ[_COMPILED] = str(folder)


def _remove_own(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork
        shutil.rmtree(folder, ignore_errors=True)


def _can_be_exchanged_in(folder: os.stat_result) -> bool:
    """Whether another user can rename entries of a folder: its owner can, and so can its writers unless it is sticky.

    This user's own group counts as this user: many systems give each user one, and new folders are writable for it.
    """
    if folder.st_uid not in (0, os.geteuid()):
        return True
    if folder.st_mode & stat.S_ISVTX:
        return False
    is_open_to_group = folder.st_mode & stat.S_IWGRP and folder.st_gid not in (0, os.getegid())
    return bool(folder.st_mode & stat.S_IWOTH or is_open_to_group)
