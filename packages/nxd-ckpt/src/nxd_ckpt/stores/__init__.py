"""Storage of checkpoints: one small interface, and its implementations.

`open_store` selects one by the form of the path; each kind has its own file. Other packages can add more.
"""

import functools
import os
import socket
from collections.abc import Callable, Collection
from importlib.metadata import entry_points

from nxd_ckpt.arguments import check_tag
from nxd_ckpt.stores.interface import Capabilities, Garbage, ReadRange, SaveTransaction, Store
from nxd_ckpt.stores.posix import PosixStore

__all__ = [
    "Capabilities",
    "Garbage",
    "ReadRange",
    "SaveTransaction",
    "Store",
    "check_processes",
    "check_tag",
    "open_store",
    "process_of",
]

GROUP = "nxd_ckpt.stores"  # entry points of other packages: a scheme, and a function that opens a URL as a `Store`
PACKAGES = {"peers": "nxd-elastic"}  # our packages by scheme, to name a missing one in the error


def process_of(path: "str | os.PathLike[str]") -> str:
    """Return an id of this process, for `check_processes`, if only it can see the store; otherwise ""."""
    return "" if open_store(path).capabilities.other_processes else f"{socket.gethostname()}:{os.getpid()}"


def check_processes(path: "str | os.PathLike[str]", processes: Collection[str]) -> None:
    """Refuse a store that the ranks do not share.

    Args:
        path: the path of the store.
        processes: the result of `process_of` on each rank.

    Raises:
        ValueError: the store is the memory of one process, and the ranks run in several.
    """
    if len(set(processes)) > 1:
        raise ValueError(
            f"path={os.fspath(path)!r} is the memory of one process, but the {len(processes)} ranks run in "
            f"{len(set(processes))} processes; use a folder that all of them can access, or an object store URL"
        )


def open_store(path: "str | os.PathLike[str]") -> Store:
    """Return the store at a path. Creates nothing; the path need not exist.

    Args:
        path: a folder, or a URL that fsspec supports, such as "s3://bucket/runs". Its file system's options come from
            fsspec's configuration or the environment. Other packages add schemes with entry points of `GROUP`, such as
            nxd-elastic's "peers://...", the memory of hosts.

    Raises:
        ValueError: it is neither a path nor a URL, or the URL's scheme is unknown.
        ImportError: the package for this scheme is not installed; says which.
    """
    root = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(root, str) or not root:
        raise ValueError(f"path={path!r} is not a folder of checkpoints; pass a path or URL as a str or Path")
    if root.startswith("file://"):
        root = root.removeprefix("file://")
    if "://" not in root:
        return PosixStore(os.path.abspath(root))
    if (factory := _factory_of(root.partition("://")[0])) is not None:
        return factory(root)
    from nxd_ckpt.stores.fsspec_store import FsspecStore  # noqa: PLC0415 - fsspec is slow to import

    return FsspecStore(root)


@functools.cache
def _factory_of(scheme: str) -> "Callable[[str], Store] | None":
    """Return another package's function that opens URLs of this scheme; None if there is no such package."""
    for found in entry_points(group=GROUP, name=scheme):
        factory: Callable[[str], Store] = found.load()
        return factory
    if scheme in PACKAGES:
        raise ImportError(f"checkpoints at {scheme}:// need another package: pip install {PACKAGES[scheme]}")
    return None
