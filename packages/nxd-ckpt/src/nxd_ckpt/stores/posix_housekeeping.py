"""What a POSIX root has beside its checkpoints: pins, the hint LATEST, and what dead saves and deletions have left.

<root>/.pins/<tag>    says that this tag is pinned
<root>/LATEST         the tag committed last, for people; nothing here reads it
"""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import lock, make_folders, new_file, remove, sync_folder, unlock, write_fully
from nxd_ckpt.manifest import FILE_FOLDERS, decode, is_file_name
from nxd_ckpt.stores.interface import Garbage

if TYPE_CHECKING:
    from nxd_ckpt.stores.posix import PosixStore

STAGING_FOLDER = ".staging"
TRASH_FOLDER = ".trash"
LOCK_NAME = "lock"
_PINS_FOLDER = ".pins"
_LATEST_NAME = "LATEST"


def pinned(root: str) -> set[str]:
    """See `Store.pinned`."""
    try:
        return set(os.listdir(os.path.join(root, _PINS_FOLDER)))
    except FileNotFoundError:
        return set()


def set_pinned(root: str, tag: str, *, to: bool) -> None:
    """See `Store.set_pinned`; on the disk when this returns."""
    folder = os.path.join(root, _PINS_FOLDER)
    make_folders(folder)
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        if to:
            with new_file(os.path.join(folder, tag)):
                pass
        else:
            os.unlink(os.path.join(folder, tag))
    sync_folder(folder)


def note_latest(root: str, tag: str) -> None:
    """Leaves the hint; one that cannot be left is no error, and it need not outlive a crash. Called under the lock."""
    scratch = os.path.join(root, STAGING_FOLDER, _LATEST_NAME)
    with contextlib.suppress(OSError):
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_fully(fd, f"{tag}\n".encode())
        finally:
            os.close(fd)
        try:
            os.replace(scratch, os.path.join(root, _LATEST_NAME))
        except OSError:
            os.unlink(scratch)


def take_lock(root: str) -> int | None:
    """The root's lock, which a save holds as long as it is at work; None where the file system has no locks.

    Raises:
        CheckpointError: somebody else has it.
    """
    make_folders(root)
    staging = os.path.join(root, STAGING_FOLDER)
    if not os.path.isdir(staging):
        os.makedirs(staging, exist_ok=True)  # need not outlive a crash, so no fsync
    try:
        return lock(os.path.join(staging, LOCK_NAME))
    except BlockingIOError:
        raise CheckpointError(f"another save is at work in {root}; wait for it or use another folder") from None


def garbage(store: "PosixStore", *, dead_after: float, delete: bool) -> list[Garbage]:
    """See `Store.garbage`: staging, trash, and files in checkpoints that no manifest speaks of."""
    root = store.location
    if not os.path.isdir(root):
        return []
    held = take_lock(root)
    try:
        paths = [*_in_folder(root, STAGING_FOLDER), *_in_folder(root, TRASH_FOLDER)]
        paths += [path for tag in store.tags() for path in _unknown_files(store, tag)]
        if held is None:  # a save may be at work
            paths = [path for path in paths if time.time() - _last_change(path) >= dead_after]
        found = [Garbage(path, sum(os.lstat(file).st_size for file in _files_in(path))) for path in paths]
        doomed = [move_to_trash(root, path) for path in paths] if delete else []
    finally:
        if held is not None:
            unlock(held)
    for path in doomed:  # takes its time, and no save should find the lock taken meanwhile
        remove(path)
    return found


def move_to_trash(root: str, path: str) -> str:
    """Takes a file or folder out of sight by one rename, and returns where it is now."""
    trash = os.path.join(root, TRASH_FOLDER)
    if os.path.dirname(path) == trash:
        return path
    make_folders(trash)
    doomed = os.path.join(trash, uuid.uuid4().hex)
    os.rename(path, doomed)
    return doomed


def _in_folder(root: str, name: str) -> list[str]:
    folder = os.path.join(root, name)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if name != LOCK_NAME]


def _unknown_files(store: "PosixStore", tag: str) -> list[str]:
    """Files that an overwriting save has left when it died; none where the manifest is damaged."""
    try:
        known = decode(store.read_manifest(tag), store.where(tag)).files
    except CheckpointError:
        return []
    folders = [folder for folder in FILE_FOLDERS if os.path.isdir(store.where(tag, folder))]
    files = [f"{folder}/{name}" for folder in folders for name in sorted(os.listdir(store.where(tag, folder)))]
    return [store.where(tag, file) for file in files if is_file_name(file) and file not in known]


def _files_in(path: str) -> Iterator[str]:
    """The file itself, or all files under a folder."""
    if not os.path.isdir(path) or os.path.islink(path):
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names)


def _last_change(path: str) -> float:
    return max(os.lstat(each).st_mtime for each in (path, *_files_in(path)))
