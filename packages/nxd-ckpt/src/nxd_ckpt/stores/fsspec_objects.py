"""Operations on object stores beyond plain reads and puts: conditional puts, multipart uploads, uniform errors.

S3 supports conditional puts (If-None-Match, If-Match), Google Cloud Storage for new objects; `memory://` uses a lock of
this process. Other stores check first and then put: of two puts at the same moment both may succeed, and the later one
counts.
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from nxd_ckpt.errors import CheckpointError

# A manifest is put in one request: not every store supports conditions on multipart uploads.
_ONE_REQUEST = {"chunksize": 5 * 2**30}

_UPLOAD_PART_BYTES = 16 * 2**20

_LOOK_THEN_PUT = threading.Lock()


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
