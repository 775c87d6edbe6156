"""Small file operations that outlive a crash: what they have written or made is on the disk when they return.

Nothing here knows what a checkpoint is; that is `store.py`.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator

_LOCKS_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@contextlib.contextmanager
def new_file(path: str) -> Iterator[int]:
    """Creates a file that must not exist yet, for writing; fsyncs it at the end."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def write_fully(fd: int, content: "bytes | memoryview") -> None:
    """Writes all of it, however many calls the system needs for that."""
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]


@contextlib.contextmanager
def existing_file(path: str) -> Iterator[int]:
    """Opens a file for reading; a symbolic link in its place is an error."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_folder(path: str) -> None:
    """Brings the folder's entries (not the content of its files) to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folders(path: str) -> None:
    """Makes the folder and its missing parents."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folders(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_folder(parent)


def remove(path: str) -> None:
    """Removes a file or a whole folder if that can be done; what stays is only space."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def lock(path: str) -> int | None:
    """Takes an exclusive lock that ends with this process at the latest.

    Returns:
        A file descriptor for `unlock`, or None where the file system has no locks.

    Raises:
        BlockingIOError: somebody else holds it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in _LOCKS_UNSUPPORTED:
            return None
        raise
    return fd


def unlock(fd: int) -> None:
    """Releases the lock, also if a child process forked meanwhile still has the file open."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
