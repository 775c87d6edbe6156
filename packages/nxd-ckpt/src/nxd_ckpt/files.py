"""Small crash-safe file operations, whose results are on disk when they return; and local copies of URLs.

This module does not know what a checkpoint is; `stores/posix.py` does.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO

from nxd_ckpt.errors import CheckpointError

# Disks read whole pages, so skipping less than a page between two runs saves nothing.
PAGE_BYTES = 4096
_MAX_BUFFERS = 1024  # per system call
_LOCKS_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


def hold_standard_streams() -> None:
    """Open the null device for closed descriptors among 0 to 2.

    Otherwise the next file or socket would get that number: a child process would replace it with its own, and
    libraries would print into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            if opened > 2:  # another thread was faster
                os.close(opened)
            else:
                os.set_inheritable(opened, True)


@contextlib.contextmanager
def new_file(path: str) -> Iterator[int]:
    """Create a file that must not exist yet, for writing, and fsync it at the end."""
    hold_standard_streams()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def own_file(path: str) -> int:
    """Open a file of this package for writing, created if missing; a link or pipe in its place is an error.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    hold_standard_streams()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"is a link to {os.readlink(path)}; remove it", path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EEXIST, "is not a regular file; remove it", path)
    return fd


def own_folder(root: str, name: str) -> str:
    """Return the path of a folder of this package, which need not exist; a link is an error.

    Raises:
        CheckpointError: it is a link, so removing files there would affect another folder.
    """
    path = os.path.join(root, name)
    if os.path.islink(path):
        raise CheckpointError(f"{path} is a link to {os.readlink(path)}, which is never followed; remove it")
    return path


def write_fully(fd: int, content: "bytes | memoryview") -> None:
    """Write all of the content, in as many system calls as needed."""
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]


@contextlib.contextmanager
def existing_file(folder: str, file: str) -> Iterator[int]:
    """Open a file for reading by its path below `folder`; links on that path and non-regular files are errors."""
    *parents, name = file.split("/")
    where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            outer = where
            where = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
            os.close(outer)
        fd = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=where
        )  # pipes would block
    finally:
        os.close(where)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", file)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def regular_file(path: str) -> Iterator[IO[bytes]]:
    """Open a file for reading, following links; a non-regular file is an error, as a named pipe would block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
        yield file


def read_vectored(fd: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """Fill each memory from its offset in the file, with as few system calls as the gaps between them allow.

    Args:
        fd: the open file.
        pieces: pairs (offset, memory), by ascending offset, not overlapping.

    Raises:
        CheckpointError: the file ends early.
    """
    run: list[memoryview] = []
    start = end = 0
    for offset, destination in pieces:
        gap = offset - end
        if run and (gap >= PAGE_BYTES or len(run) > _MAX_BUFFERS - 2):
            _read_fully(fd, start, run)
            run = []
        if not run:
            start = offset
        elif gap:
            run.append(memoryview(bytearray(gap)))  # read and discarded
        run.append(destination)
        end = offset + len(destination)
    _read_fully(fd, start, run)


def _read_fully(fd: int, position: int, buffers: list[memoryview]) -> None:
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        count = os.preadv(fd, left, position)
        if count == 0:
            raise CheckpointError(f"the file ends at byte {position}, {sum(map(len, left))} bytes early")
        position += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def sync_folder(path: str) -> None:
    """Flush the folder's entries (not the contents of its files) to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folders(path: str) -> None:
    """Create the folder and its missing parents.

    Raises:
        CheckpointError: something else exists there, such as a dangling link.
    """
    if os.path.isdir(path):
        return
    if os.path.islink(path):
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}, which is not a folder; create it or remove the link"
        )
    if os.path.exists(path):
        raise CheckpointError(f"{path} is not a folder; choose another path")
    parent = os.path.dirname(path)
    make_folders(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_folder(parent)


def remove(path: str) -> None:
    """Remove a file or a whole folder if possible; a failure only wastes space."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def lock(path: str) -> int | None:
    """Take an exclusive lock that ends with this process at the latest.

    Returns:
        A file descriptor for `unlock`, or None if the file system has no locks.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the path is a link or not a regular file.
    """
    fd = own_file(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in _LOCKS_UNSUPPORTED:
            return None
        raise
    return fd


def unlock(fd: int) -> None:
    """Release the lock, even if a child process forked in the meantime still has the file open."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def is_remote(path: str) -> bool:
    """Whether a path is a URL such as "s3://bucket/folder"."""
    return "://" in path


@contextlib.contextmanager
def local_copy(path: "str | os.PathLike[str]") -> Iterator[str]:
    """Yield a local folder with the content of a URL, for the duration of the context; local paths are unchanged.

    For checkpoints of other formats, which are read through mapped files; `nxd_ckpt.stores` reads our own in place.

    Raises:
        CheckpointError: there is nothing at the URL, or it cannot be read.
        ValueError: the scheme is unknown.
        ImportError: the package for this scheme is not installed; says which.
    """
    source = os.fspath(path)
    if not is_remote(source):
        yield source
        return
    import fsspec  # noqa: PLC0415 - slow to import

    file_system, inner_path = fsspec.core.url_to_fs(source)
    with tempfile.TemporaryDirectory(prefix="nxd-ckpt-") as folder:
        target = os.path.join(folder, "copy")
        try:
            file_system.get(inner_path.rstrip("/") + "/", target + "/", recursive=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"there is nothing at {source}") from error
        except Exception as error:  # each scheme's package has its own errors
            raise CheckpointError(f"{source} cannot be read: {type(error).__name__}: {error}") from error
        yield target


def has_file(folder: str, name: str) -> bool:
    """Whether the folder has a file of this name."""
    return os.path.isfile(os.path.join(folder, name))
