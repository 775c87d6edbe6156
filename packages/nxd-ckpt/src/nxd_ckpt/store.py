"""A checkpoint root on a POSIX file system: its folders, and the few operations that change them safely.

    <root>/<tag>/manifest.json, <root>/<tag>/data/...   a checkpoint
    <root>/.staging/lock, <root>/.staging/<save_id>/    a save that is not committed yet
    <root>/.trash/                                      a checkpoint on its way out

A new checkpoint appears by one rename of its folder. One that is overwritten changes by one rename of its manifest: the
new data files, whose names are unique to the save, are moved next to the old ones first. What the files contain is not
known here, except for the names above.
"""

import os
import re
import uuid
from collections.abc import Iterable

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import existing_file, lock, make_folders, new_file, remove, sync_folder, unlock, write_fully
from nxd_ckpt.manifest import DATA_FOLDER, MANIFEST_NAME, is_data_file_name

STAGING_FOLDER = ".staging"
TRASH_FOLDER = ".trash"
_LOCK_NAME = "lock"
_TAG = re.compile(r"(?!\.)[^/\\\x00-\x1f\x7f]{1,200}")


def root_folder(path: "str | os.PathLike[str]") -> str:
    """The root as an absolute path.

    Raises:
        ValueError: the path is a URL.
    """
    root = os.fspath(path)
    if "://" in root:
        raise ValueError(f"path={root!r} is a URL; this version stores checkpoints in local or mounted folders only")
    return os.path.abspath(root)


def check_tag(tag: str) -> str:
    """Returns the tag if it can be the name of a folder.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(tag, str) or _TAG.fullmatch(tag) is None:
        raise ValueError(
            f"tag {tag!r} is not allowed: a tag is the name of a folder, such as 'step-1000'; it has 1 to 200 "
            "characters, no separators or control characters, and does not start with a dot"
        )
    return tag


def manifest_path(root: str, tag: str) -> str:
    """Where the manifest of a tag lies."""
    return os.path.join(root, tag, MANIFEST_NAME)


def data_path(root: str, tag: str, file: str) -> str:
    """Where a data file of a tag lies."""
    return os.path.join(root, tag, DATA_FOLDER, file)


def read_manifest_bytes(root: str, tag: str) -> bytes:
    """The manifest as it lies on the disk; FileNotFoundError or NotADirectoryError if there is none."""
    with existing_file(manifest_path(root, tag)) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        return file.read()


def tags_with_manifest(root: str) -> list[str]:
    """Names of the folders that look like checkpoints, in no meaningful order."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    return [name for name in sorted(names) if _TAG.fullmatch(name) and os.path.isfile(manifest_path(root, name))]


class StagedSave:
    """One save on its way: `begin`, then data files are written to `data_path`, then `commit`; `end` in any case.

    `begin`, `commit` and `end` are for one process; all may ask for `data_path`.
    """

    def __init__(self, root: str, tag: str, save_id: str, *, overwrite: bool) -> None:
        self._root = root
        self._target = os.path.join(root, tag)
        self._staging = os.path.join(root, STAGING_FOLDER)
        self._staged = os.path.join(self._staging, save_id)
        self._overwrite = overwrite
        self._begun = False
        self._lock: int | None = None

    def data_path(self, file: str) -> str:
        """Where to write a data file."""
        return os.path.join(self._staged, DATA_FOLDER, file)

    def begin(self) -> None:
        """Takes the root's lock, clears what dead saves left, and makes the staging folder.

        Raises:
            CheckpointError: the tag is taken, or another save is at work in this root.
        """
        make_folders(self._staging)
        try:
            self._lock = lock(os.path.join(self._staging, _LOCK_NAME))
        except BlockingIOError:
            raise CheckpointError(
                f"another save is at work in {self._root}; wait for it or use another folder"
            ) from None
        self._begun = True
        self._check_target()
        if self._lock is not None:  # nobody else is saving, so whatever lies there belongs to a save that died
            _clear(self._staging, keep=_LOCK_NAME)
            _clear(os.path.join(self._root, TRASH_FOLDER))
        os.makedirs(os.path.join(self._staged, DATA_FOLDER))

    def commit(self, manifest: bytes) -> None:
        """Makes the data files, which are on the disk already, a checkpoint. All or nothing, also in a crash."""
        with new_file(os.path.join(self._staged, MANIFEST_NAME)) as fd:
            write_fully(fd, manifest)
        sync_folder(os.path.join(self._staged, DATA_FOLDER))
        sync_folder(self._staged)
        self._check_target()
        if os.path.lexists(self._target):
            _replace(self._staged, self._target)
        else:
            os.rename(self._staged, self._target)  # fails if a folder with content has appeared there
            sync_folder(self._root)

    def end(self) -> None:
        """Removes what is left in staging and releases the lock; does nothing where `begin` was not called."""
        try:
            if self._begun:
                remove(self._staged)
        finally:
            if self._lock is not None:
                unlock(self._lock)
            self._begun, self._lock = False, None

    def _check_target(self) -> None:
        if not os.path.lexists(self._target):
            return
        if not os.path.isfile(os.path.join(self._target, MANIFEST_NAME)):
            raise CheckpointError(f"{self._target} exists and is not a checkpoint; move it or choose another tag")
        if not self._overwrite:
            raise CheckpointError(f"{self._target} exists; choose another tag or pass overwrite=True")


def discard(root: str, tag: str) -> None:
    """Takes a checkpoint away in one rename, then frees its space."""
    trash = os.path.join(root, TRASH_FOLDER)
    make_folders(trash)
    doomed = os.path.join(trash, uuid.uuid4().hex)
    os.rename(os.path.join(root, tag), doomed)
    sync_folder(root)
    remove(doomed)


def check_sizes(paths_and_sizes: Iterable[tuple[str, int]]) -> None:
    """Compares files with what they should be.

    Raises:
        CheckpointError: names every file that is missing or of another size.
    """
    problems = []
    for path, expected in paths_and_sizes:
        try:
            found = os.stat(path).st_size
        except FileNotFoundError:
            problems.append(f"data file {path} is missing")
            continue
        if found != expected:
            problems.append(f"data file {path} has {found} bytes, expected {expected}")
    if problems:
        raise CheckpointError("; ".join(problems))


def _replace(staged: str, target: str) -> None:
    """Turns the checkpoint in `target` into the staged one; the rename of the manifest is the commit."""
    target_data = os.path.join(target, DATA_FOLDER)
    new_files = os.listdir(os.path.join(staged, DATA_FOLDER))
    make_folders(target_data)
    for name in new_files:
        os.rename(os.path.join(staged, DATA_FOLDER, name), os.path.join(target_data, name))
    sync_folder(target_data)
    os.replace(os.path.join(staged, MANIFEST_NAME), os.path.join(target, MANIFEST_NAME))
    sync_folder(target)
    for name in set(os.listdir(target_data)) - set(new_files):
        if is_data_file_name(name):
            remove(os.path.join(target_data, name))


def _clear(folder: str, keep: str = "") -> None:
    if os.path.isdir(folder):
        for name in os.listdir(folder):
            if name != keep:
                remove(os.path.join(folder, name))
