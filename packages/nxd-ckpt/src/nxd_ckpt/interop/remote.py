"""Copies checkpoints of other formats from URLs to this machine, since they are read through mapped files.

Checkpoints of this package need no copy; `nxd_ckpt.stores` reads them in place.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from nxd_ckpt.errors import CheckpointError


def is_remote(path: str) -> bool:
    """Whether it is a URL such as "s3://bucket/folder"."""
    return "://" in path


@contextmanager
def local_copy(path: "str | os.PathLike[str]") -> Iterator[str]:
    """Yield a local folder with the content of a URL, for the duration of the context; local paths are unchanged.

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
