"""One save into an object store: files under final keys, unique to it, then one conditional put of the manifest.

Keys that no manifest speaks of belong to a save that is still at work or to one that died, which nobody can tell apart;
so a save removes only its own files, and those of the checkpoint it replaced. The rest is for `gc`, after a time.
"""

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import decode
from nxd_ckpt.stores.fsspec_objects import os_errors, put_if_unchanged, upload, version_of

if TYPE_CHECKING:
    from nxd_ckpt.stores.fsspec_store import FsspecStore


class FsspecSave:
    """A `SaveTransaction` on an object store."""

    def __init__(self, store: "FsspecStore", tag: str, save_id: str, *, overwrite: bool) -> None:
        self._store = store
        self._tag = tag
        self._save_id = save_id
        self._overwrite = overwrite
        self._manifest_key = store.key(tag)
        self._seen: str | None = None
        self._owns_files = False

    def begin(self) -> None:
        """See `SaveTransaction.begin`."""
        with os_errors():
            self._seen = version_of(self._store.fs, self._manifest_key)
        if self._seen is not None and not self._overwrite:
            raise CheckpointError(
                f"{self._store.location}/{self._tag} exists; choose another tag or pass overwrite=True"
            )
        self._owns_files = True

    def write_file(self, file: str, parts: "Iterable[bytes | memoryview]") -> None:
        """See `SaveTransaction.write_file`."""
        upload(self._store.fs, self._store.key(self._tag, file), parts)

    def file_size(self, file: str) -> int:
        """See `SaveTransaction.file_size`."""
        return self._store.file_size(self._tag, file)

    def commit(self, manifest: bytes) -> None:
        """See `SaveTransaction.commit`: of several saves of a tag at once one wins.

        Raises:
            CheckpointError: it was another one.
        """
        replaced = self._files_to_replace()
        self._owns_files = False  # if the put fails half-way, nobody knows whether a manifest speaks of them
        try:
            put_if_unchanged(self._store.fs, self._manifest_key, manifest, self._seen)
        except FileExistsError:
            self._owns_files = True
            raise CheckpointError(
                f"{self._store.location}/{self._tag} was saved or deleted by another process while this save was at "
                "work; that one counts, so choose another tag or save again"
            ) from None
        with contextlib.suppress(OSError):  # what stays is only space, or a hint
            self._store.note_latest(self._tag)
            self._store.remove_files(self._tag, replaced)

    def end(self) -> None:
        """See `SaveTransaction.end`: removes this save's files if they were not committed."""
        if not self._owns_files:
            return
        self._owns_files = False
        with contextlib.suppress(OSError):
            mine = [file for file in self._store.files(self._tag) if file.split("/")[1].startswith(self._save_id)]
            self._store.remove_files(self._tag, mine)

    def _files_to_replace(self) -> list[str]:
        if self._seen is None:
            return []
        try:
            return list(decode(self._store.read_manifest(self._tag), self._store.where(self._tag)).files)
        except (CheckpointError, FileNotFoundError):
            return []  # a damaged checkpoint may be overwritten; `gc` finds its files
