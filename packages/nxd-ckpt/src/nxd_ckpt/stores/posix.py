"""A checkpoint root on a POSIX file system: its folders, and the few operations that change them safely.

    <root>/<tag>/manifest.json, <root>/<tag>/data/...   a checkpoint
    <root>/.staging/lock, <root>/.staging/<save_id>/    a save that is not committed yet
    <root>/.staging/<save_id>.holds                     the data of other checkpoints that it will reference
    <root>/<tag>/retired.json, <root>/<tag>/data/...    a deleted checkpoint whose data is partly still referenced
    <root>/.trash/                                      checkpoints being removed
    <root>/.pins/<tag>                                  marks this tag as pinned
    <root>/LATEST                                       the tag committed last, for people; nothing here reads it

A new checkpoint appears by one rename of its folder. Overwriting one takes one rename of its manifest: the new data
files, whose names are unique to the save, are moved next to the old ones first.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence

from nxd_ckpt.arguments import is_tag
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import (
    existing_file,
    lock,
    make_folders,
    new_file,
    own_file,
    own_folder,
    read_vectored,
    remove,
    sync_folder,
    unlock,
    write_fully,
)
from nxd_ckpt.manifest import FILE_FOLDERS, MANIFEST_NAME, MAX_MANIFEST_BYTES, file_names_in, is_file_name
from nxd_ckpt.stores.interface import Capabilities, Garbage, ReadRange
from nxd_ckpt.stores.manifests import by_place, files_in_manifests, files_in_use, places_in, read_head

_STAGING_FOLDER = ".staging"
_TRASH_FOLDER = ".trash"
_LOCK_NAME = "lock"
_PINS_FOLDER = ".pins"
_LATEST_NAME = "LATEST"
_RETIRED_NAME = "retired.json"
_HOLDS_SUFFIX = ".holds"


class PosixStore:
    """A local folder, or a mounted one that all ranks share."""

    capabilities = Capabilities(other_processes=True, other_files=True, remote=False)

    def __init__(self, root: str) -> None:
        self.location = root

    def where(self, tag: str, file: str = MANIFEST_NAME) -> str:
        """See `Store.where`."""
        return os.path.join(self.location, tag, file)

    def tags(self) -> list[str]:
        """See `Store.tags`."""
        try:
            names = os.listdir(self.location)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [name for name in sorted(names) if is_tag(name) and _may_exist(self.where(name))]

    def beginnings(self, num_bytes: int) -> Iterator[tuple[str, bytes, int | None]]:
        """See `Store.beginnings`."""
        for tag in self.tags():
            try:
                with existing_file(os.path.join(self.location, tag), MANIFEST_NAME) as fd:
                    yield tag, os.pread(fd, num_bytes, 0), os.fstat(fd).st_size
            except OSError:
                yield tag, b"", None

    def read_manifest(self, tag: str) -> bytes:
        """See `Store.read_manifest`."""
        try:
            with (
                existing_file(os.path.join(self.location, tag), MANIFEST_NAME) as fd,
                os.fdopen(fd, "rb", closefd=False) as file,
            ):
                content = file.read(MAX_MANIFEST_BYTES + 1)
        except NotADirectoryError as error:
            raise FileNotFoundError(error.errno, error.strerror, self.where(tag)) from None
        if len(content) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{self.where(tag)} is larger than a manifest can be ({MAX_MANIFEST_BYTES} bytes)")
        return content

    def file_size(self, tag: str, file: str) -> int:
        """See `Store.file_size`."""
        with existing_file(os.path.join(self.location, tag), file) as fd:
            return os.fstat(fd).st_size

    def read_into(self, tag: str, file: str, ranges: Sequence[ReadRange]) -> None:
        """See `Store.read_into`."""
        with existing_file(os.path.join(self.location, tag), file) as fd:
            read_vectored(fd, [(piece.offset, piece.destination) for piece in ranges])

    def delete(self, tag: str) -> None:
        """See `Store.delete`: the manifest is renamed, then unreferenced files are removed."""
        folder = os.path.join(self.location, tag)
        places = places_in(self, tag)
        if places is None and (foreign := _foreign_file(folder)):
            raise CheckpointError(
                f"{self.where(tag)} is damaged, and nxd-ckpt did not write {foreign}; remove {folder} by hand"
            )
        places = (places or {}) | dict.fromkeys(_data_files(folder), tag)
        os.rename(self.where(tag), self.where(tag, _RETIRED_NAME))
        sync_folder(folder)
        used = files_in_use(self, places)
        doomed = by_place(places.keys() - used, places)
        for place in {tag, *doomed}:
            self._remove_files(place, doomed.get(place, []))

    def _remove_files(self, tag: str, files: Collection[str]) -> None:
        """Remove data files under a tag; the last ones of a deleted checkpoint are removed by one rename."""
        folder = os.path.join(self.location, tag)
        if _is_retired(folder) and _data_files(folder) <= set(files):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                trash = _move_to_trash(self.location, folder)
                sync_folder(self.location)
                remove(trash)
        else:
            for file in files:
                remove(self.where(tag, file))

    def held(self) -> set[str]:
        """See `Store.held`."""
        found: set[str] = set()
        for path in _in_folder(self.location, _STAGING_FOLDER):
            if path.endswith(_HOLDS_SUFFIX):
                with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                    found |= file_names_in(file.read())
        return found

    def begin_save(self, tag: str, save_id: str, *, overwrite: bool) -> "PosixSave":
        """See `Store.begin_save`."""
        return PosixSave(self, tag, save_id, overwrite=overwrite)

    def pinned(self) -> set[str]:
        """See `Store.pinned`."""
        try:
            return set(os.listdir(os.path.join(self.location, _PINS_FOLDER)))
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def set_pinned(self, tag: str, *, to: bool) -> None:
        """See `Store.set_pinned`; durable when this returns."""
        folder = own_folder(self.location, _PINS_FOLDER)
        make_folders(folder)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            if to:
                with new_file(os.path.join(folder, tag)):
                    pass
            else:
                os.unlink(os.path.join(folder, tag))
        sync_folder(folder)

    def garbage(self, *, dead_after: float, delete: bool) -> list[Garbage]:
        """See `Store.garbage`: staging, trash, and files in checkpoints that no manifest lists."""
        root = self.location
        if not os.path.isdir(root):
            return []
        held = _take_lock(root)
        try:
            paths = [*_in_folder(root, _STAGING_FOLDER), *_in_folder(root, _TRASH_FOLDER)]
            paths += _orphans(self, nothing_at_work=held is not None)
            if held is None:  # a save may be in progress
                paths = [path for path in paths if time.time() - _last_change(path) >= dead_after]
            found = [Garbage(path, sum(os.lstat(file).st_size for file in _files_in(path))) for path in paths]
            doomed = [_move_to_trash(root, path) for path in paths] if delete else []
        finally:
            if held is not None:
                unlock(held)
        for path in doomed:  # slow, so the lock is released first
            remove(path)
        return found


class PosixSave:
    """A `SaveTransaction` that stages in a folder beside the checkpoints and commits by one rename."""

    def __init__(self, store: PosixStore, tag: str, save_id: str, *, overwrite: bool) -> None:
        self._store = store
        self._root = root = store.location
        self._target = os.path.join(root, tag)
        self._staging = own_folder(root, _STAGING_FOLDER)
        self._staged = os.path.join(self._staging, save_id)
        self._holds = f"{self._staged}{_HOLDS_SUFFIX}"
        self._overwrite = overwrite
        self._begun = False
        self._lock: int | None = None

    def begin(self) -> None:
        """See `SaveTransaction.begin`: takes the root's lock and creates the staging folder."""
        self._lock = _take_lock(self._root)
        self._begun = True
        self._check_target()
        if self._lock is not None:  # no other process is saving, so anything there belongs to a failed save
            _clear(self._staging, keep=_LOCK_NAME)
            _clear(own_folder(self._root, _TRASH_FOLDER))
        os.makedirs(os.path.join(self._staged, "data"))

    def hold(self, files: Collection[str]) -> None:
        """See `SaveTransaction.hold`. It need not outlive a crash, so no fsync."""
        fd = os.open(self._holds, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_fully(fd, "\n".join(sorted(files)).encode())
        finally:
            os.close(fd)

    def write_file(self, file: str, parts: "Iterable[bytes | memoryview]", num_bytes: int) -> None:
        """See `SaveTransaction.write_file`: into the staging folder."""
        if not os.path.isdir(self._staged):
            raise CheckpointError(
                f"{self._staged} does not exist on this rank, although rank 0 created it; path must be on a file "
                "system that all ranks share"
            )
        path = os.path.join(self._staged, file)
        if not os.path.isdir(os.path.dirname(path)):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with new_file(path) as fd:
            for part in parts:
                write_fully(fd, part)

    def file_size(self, file: str) -> int:
        """See `SaveTransaction.file_size`."""
        return os.lstat(os.path.join(self._staged, file)).st_size

    def commit(self, manifest: bytes) -> None:
        """See `SaveTransaction.commit`: by one rename, of the staged folder or of the manifest."""
        with new_file(os.path.join(self._staged, MANIFEST_NAME)) as fd:
            write_fully(fd, manifest)
        self._check_target()
        if os.path.lexists(self._target):
            _replace(self._staged, self._target)
            self._remove_what_was_replaced(manifest)
        else:
            _publish(self._staged, self._target)
        _note_latest(self._root, os.path.basename(self._target))

    def end(self) -> None:
        """See `SaveTransaction.end`: clears staging and releases the lock."""
        try:
            if self._begun:
                remove(self._staged)
                if os.path.lexists(self._holds):
                    remove(self._holds)
        finally:
            if self._lock is not None:
                unlock(self._lock)
            self._begun, self._lock = False, None

    def _check_target(self) -> None:
        if not os.path.lexists(self._target) or _is_retired(self._target):
            return
        if not os.path.isfile(os.path.join(self._target, MANIFEST_NAME)):
            raise CheckpointError(f"{self._target} exists and is not a checkpoint; move it or choose another tag")
        if not self._overwrite:
            raise CheckpointError(f"{self._target} exists; choose another tag or pass overwrite=True")

    def _remove_what_was_replaced(self, manifest: bytes) -> None:
        """Remove all files in the folder that neither the new manifest nor another checkpoint lists."""
        replaced = _data_files(self._target) - file_names_in(manifest)
        places = dict.fromkeys(replaced, os.path.basename(self._target))
        for file in replaced - files_in_use(self._store, places):
            remove(os.path.join(self._target, file))
        if os.path.lexists(retired := os.path.join(self._target, _RETIRED_NAME)):
            remove(retired)


def _may_exist(path: str) -> bool:
    """Return False only if nothing of this name exists: a path that cannot be read may be a damaged file."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _file_folders(checkpoint: str) -> list[str]:
    """Return a checkpoint's folders of files; links are ignored."""
    folders = [os.path.join(checkpoint, name) for name in FILE_FOLDERS]
    return [folder for folder in folders if os.path.isdir(folder) and not os.path.islink(folder)]


def _publish(staged: str, target: str) -> None:
    """Turn the staged folder into a checkpoint by one rename."""
    for folder in _file_folders(staged):
        sync_folder(folder)
    sync_folder(staged)
    os.rename(staged, target)  # fails if a folder with content has appeared there
    sync_folder(os.path.dirname(target))


def _replace(staged: str, target: str) -> None:
    """Turn the checkpoint in `target` into the staged one; the rename of the manifest is the commit."""
    for folder in _file_folders(staged):
        target_folder = own_folder(target, os.path.basename(folder))
        make_folders(target_folder)
        for name in os.listdir(folder):
            os.rename(os.path.join(folder, name), os.path.join(target_folder, name))
        sync_folder(target_folder)
    os.replace(os.path.join(staged, MANIFEST_NAME), os.path.join(target, MANIFEST_NAME))
    sync_folder(target)


def _data_files(checkpoint: str) -> set[str]:
    """Return the files below a checkpoint's folder that this package could have written, as relative paths."""
    folders = _file_folders(checkpoint)
    files = {f"{os.path.basename(folder)}/{name}" for folder in folders for name in os.listdir(folder)}
    return {file for file in files if is_file_name(file)}


def _foreign_file(checkpoint: str) -> str:
    """Return the path of a file in a checkpoint's folder that this package cannot have written; "" if there is none."""
    own = {os.path.join(checkpoint, file) for file in (*_data_files(checkpoint), MANIFEST_NAME, _RETIRED_NAME)}
    return next((path for path in _files_in(checkpoint) if path not in own), "")


def _is_retired(checkpoint: str) -> bool:
    """Whether this is a deleted checkpoint that others still reference."""
    is_retired, is_there = (os.path.isfile(os.path.join(checkpoint, it)) for it in (_RETIRED_NAME, MANIFEST_NAME))
    return is_retired and not is_there


def _clear(folder: str, keep: str = "") -> None:
    if os.path.isdir(folder):
        for name in os.listdir(folder):
            if name != keep:
                remove(os.path.join(folder, name))


def _note_latest(root: str, tag: str) -> None:
    """Write the LATEST hint. A failure is not an error, and the hint need not survive a crash. Needs the lock."""
    scratch = os.path.join(root, _STAGING_FOLDER, _LATEST_NAME)
    with contextlib.suppress(OSError):
        fd = own_file(scratch)
        try:
            os.ftruncate(fd, 0)
            write_fully(fd, f"{tag}\n".encode())
        finally:
            os.close(fd)
        try:
            os.replace(scratch, os.path.join(root, _LATEST_NAME))
        except OSError:
            os.unlink(scratch)


def _take_lock(root: str) -> int | None:
    """Take the root's lock, which a save holds while it is in progress; None if the file system has no locks.

    Raises:
        CheckpointError: another process holds it.
    """
    make_folders(root)
    staging = own_folder(root, _STAGING_FOLDER)
    if not os.path.isdir(staging):
        os.makedirs(staging, exist_ok=True)  # need not survive a crash, so no fsync
    try:
        return lock(os.path.join(staging, _LOCK_NAME))
    except BlockingIOError:
        raise CheckpointError(f"another save is in progress in {root}; wait for it or use another folder") from None


def _move_to_trash(root: str, path: str) -> str:
    """Moves a file or folder to the trash by one rename and returns its new path."""
    trash = own_folder(root, _TRASH_FOLDER)
    if os.path.dirname(path) == trash:
        return path
    make_folders(trash)
    doomed = os.path.join(trash, uuid.uuid4().hex)
    os.rename(path, doomed)
    return doomed


def _in_folder(root: str, name: str) -> list[str]:
    folder = own_folder(root, name)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if name != _LOCK_NAME]


def _orphans(store: PosixStore, *, nothing_at_work: bool) -> list[str]:
    """Return files that no checkpoint needs, left by failed overwrites and deletions. A deleted checkpoint without any
    needed file is one path.
    """
    tags = [name for name in sorted(os.listdir(store.location)) if is_tag(name)]
    retired = [tag for tag in tags if _is_retired(os.path.join(store.location, tag))]
    unknown = {tag: _unknown_files(store, tag) for tag in (*store.tags(), *retired)}
    places = {file: tag for tag, of_tag in unknown.items() for file in of_tag}
    if nothing_at_work:  # holds of failed saves no longer count
        used = files_in_manifests(store, places)
    else:  # twice: a save may take over files from a checkpoint that is deleted in the meantime
        used = files_in_use(store, places) | files_in_use(store, places)
    found = []
    for tag, of_tag in unknown.items():
        if tag in retired and not used.intersection(of_tag):
            found.append(os.path.join(store.location, tag))
        else:
            found += [store.where(tag, file) for file in of_tag if file not in used]
    return found


def _unknown_files(store: PosixStore, tag: str) -> list[str]:
    """Return files that the manifest, if any, does not list; an empty list if the manifest is damaged."""
    known: Collection[str] = ()
    try:
        known = read_head(store, tag).files
    except FileNotFoundError:
        pass
    except CheckpointError:
        return []
    return sorted(_data_files(os.path.join(store.location, tag)) - set(known))


def _files_in(path: str) -> Iterator[str]:
    """Yield the file itself, or all files under a folder."""
    if not os.path.isdir(path) or os.path.islink(path):
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names)


def _last_change(path: str) -> float:
    return max(os.lstat(each).st_mtime for each in (path, *_files_in(path)))
