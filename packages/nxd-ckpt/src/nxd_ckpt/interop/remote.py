"""Checkpoints of other formats behind URLs: copied to this machine, as they are read through mapped files.

Our own need no copy; `nxd_ckpt.stores` reads them where they are.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


def is_remote(path: str) -> bool:
    """Whether it is a URL such as "s3://bucket/folder"."""
    return "://" in path


@contextmanager
def local_copy(path: "str | os.PathLike[str]") -> Iterator[str]:
    """A folder on this machine with the content of a URL, for as long as the context lasts; local paths as they are.

    Raises:
        FileNotFoundError: there is nothing at the URL.
        ValueError: the scheme is not known.
        ImportError: the package for this scheme is not installed; says which.
    """
    source = os.fspath(path)
    if not is_remote(source):
        yield source
        return
    import fsspec  # noqa: PLC0415 - takes its time to import

    file_system, inner_path = fsspec.core.url_to_fs(source)
    with tempfile.TemporaryDirectory(prefix="nxd-ckpt-") as folder:
        target = os.path.join(folder, "copy")
        file_system.get(inner_path.rstrip("/") + "/", target + "/", recursive=True)
        yield target
