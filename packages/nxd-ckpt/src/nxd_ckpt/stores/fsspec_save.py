"""A save to an object store: multipart uploads, and a conditional put of the manifest.

S3 supports conditional puts (If-None-Match, If-Match), Google Cloud Storage for new objects; `memory://` uses a lock of
this process. Other stores check first and then put: of two puts at the same moment both may succeed, and the later one
counts.
"""

import contextlib
import hashlib
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.stores.manifests import places_of, read_head

if TYPE_CHECKING:
    from nxd_ckpt.stores.fsspec_store import FsspecStore

# A manifest is put in one request: not every store supports conditions on multipart uploads.
_ONE_REQUEST = {"chunksize": 5 * 2**30}

_UPLOAD_PART_BYTES = 16 * 2**20

_LOOK_THEN_PUT = threading.Lock()


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
        self._holds = False

    def begin(self) -> None:
        """See `SaveTransaction.begin`."""
        with os_errors():
            self._seen = version_of(self._store.fs, self._manifest_key)
        if self._seen is not None and not self._overwrite:
            raise CheckpointError(
                f"{self._store.location}/{self._tag} exists; choose another tag or pass overwrite=True"
            )
        self._owns_files = True

    def hold(self, files: Collection[str]) -> None:
        """See `SaveTransaction.hold`."""
        self._holds = True
        self._store.set_held(self._save_id, files)

    def write_file(self, file: str, parts: "Iterable[bytes | memoryview]", num_bytes: int) -> None:
        """See `SaveTransaction.write_file`."""
        upload(self._store.fs, self._store.key(self._tag, file), parts)

    def file_size(self, file: str) -> int:
        """See `SaveTransaction.file_size`."""
        return self._store.file_size(self._tag, file)

    def commit(self, manifest: bytes) -> None:
        """See `SaveTransaction.commit`: if several saves use a tag at once, one wins.

        Raises:
            CheckpointError: another save won.
        """
        replaced = self._files_to_replace()
        self._owns_files = False  # if the put fails halfway, the manifest may or may not list them
        try:
            put_if_unchanged(self._store.fs, self._manifest_key, manifest, self._seen)
        except FileExistsError:
            self._owns_files = True
            raise CheckpointError(
                f"{self._store.location}/{self._tag} was saved or deleted by another process while this save was in "
                "progress; that change stays, so choose another tag or save again"
            ) from None
        with contextlib.suppress(OSError):  # a failure only wastes space or leaves an old hint
            self._store.note_latest(self._tag)
            self._store.remove_unused(replaced)

    def end(self) -> None:
        """See `SaveTransaction.end`: removes this save's files if they were not committed."""
        if self._holds:
            self._holds = False
            with contextlib.suppress(OSError):
                self._store.set_held(self._save_id, ())
        if not self._owns_files:
            return
        self._owns_files = False
        with contextlib.suppress(OSError):
            mine = [file for file in self._store.files(self._tag) if file.split("/")[1].startswith(self._save_id)]
            self._store.remove_files(self._tag, mine)

    def _files_to_replace(self) -> dict[str, str]:
        if self._seen is None:
            return {}
        try:
            return places_of(read_head(self._store, self._tag), self._tag)
        except (CheckpointError, FileNotFoundError):
            return {}  # a damaged checkpoint may be overwritten; `gc` finds its files


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Turn whatever the clients of object stores raise into an OSError."""
    try:
        yield
    except (OSError, CheckpointError, ValueError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def protocols_of(fs: Any) -> set[str]:
    """Return the URL schemes of a file system, such as `{"s3", "s3a"}`."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def version_of(fs: Any, key: str) -> str | None:
    """Return a string that changes whenever the object does; None if there is no such object."""
    try:
        info = fs.info(key)
        return str(info["ETag"]) if "ETag" in info else hashlib.sha256(fs.cat_file(key)).hexdigest()
    except FileNotFoundError:
        return None


def put_if_unchanged(fs: Any, key: str, content: bytes, seen: str | None) -> None:
    """Write the object if its `version_of` is still `seen`.

    Raises:
        FileExistsError: it has changed.
        OSError: it could not be written, or it is not known whether it was.
    """
    try:
        with os_errors():
            _put(fs, key, content, seen)
    except OSError as error:
        with os_errors():
            found = version_of(fs, key)
            if found is not None and fs.cat_file(key) == content:
                return  # it was written, but the response was lost and the client retried
        if found != seen:
            raise FileExistsError(f"{key} was changed by another writer in the meantime") from error
        raise


def upload(fs: Any, key: str, parts: "Iterable[bytes | memoryview]") -> None:
    """Write a new object part by part, holding no more than one upload part of it in memory."""
    with os_errors():
        stream = fs.open(key, "wb", block_size=_UPLOAD_PART_BYTES)
        try:
            for part in parts:
                whole = memoryview(part)
                for start in range(0, whole.nbytes, _UPLOAD_PART_BYTES):
                    stream.write(whole[start : start + _UPLOAD_PART_BYTES])
        except BaseException:
            with contextlib.suppress(Exception):
                stream.discard()
            with contextlib.suppress(Exception):
                stream.close()
            raise
        stream.close()


def _put(fs: Any, key: str, content: bytes, seen: str | None) -> None:
    protocols = protocols_of(fs)
    if seen is None and protocols & {"s3", "gs"}:
        fs.pipe_file(key, content, mode="create", **_ONE_REQUEST)
    elif "s3" in protocols:
        fs.pipe_file(key, content, IfMatch=seen, **_ONE_REQUEST)
    else:
        with _LOOK_THEN_PUT:
            if version_of(fs, key) != seen:
                raise FileExistsError(key)
            fs.pipe_file(key, content)
