"""Storage of checkpoints: one small interface, and its implementations.

`open_store` chooses one by the form of the path; each kind has a file of its own. Other packages bring further ones.
"""

import functools
import os
import socket
from collections.abc import Callable, Collection
from importlib.metadata import entry_points

from nxd_ckpt.stores.interface import Capabilities, Garbage, Piece, SaveTransaction, Store
from nxd_ckpt.stores.posix import PosixStore
from nxd_ckpt.tags import check_tag

__all__ = [
    "Capabilities",
    "Garbage",
    "Piece",
    "SaveTransaction",
    "Store",
    "check_processes",
    "check_tag",
    "open_store",
    "process_of",
]

GROUP = "nxd_ckpt.stores"  # entry points of other packages: a scheme, and what makes a `Store` of a URL
PACKAGES = {"peers": "nxd-elastic"}  # of ours, by scheme, so that a missing one can be named


def process_of(path: "str | os.PathLike[str]") -> str:
    """Which process alone sees what this one stores there, as `check_processes` takes it; "" if others see it, too."""
    return "" if open_store(path).capabilities.other_processes else f"{socket.gethostname()}:{os.getpid()}"


def check_processes(path: "str | os.PathLike[str]", processes: Collection[str]) -> None:
    """Refuses ranks of which none sees what the others store.

    Args:
        path: what they want to use.
        processes: of each rank, from `process_of`.

    Raises:
        ValueError: the store is the memory of each process alone, and they are several.
    """
    if len(set(processes)) > 1:
        raise ValueError(
            f"path={os.fspath(path)!r} is the memory of one process, but the {len(processes)} ranks are "
            f"{len(set(processes))} processes; use a folder that all of them see, or the URL of an object store"
        )


def open_store(path: "str | os.PathLike[str]") -> Store:
    """The store at a path. Creates nothing; the path need not exist.

    Args:
        path: a folder, or a URL that fsspec knows, such as "s3://bucket/runs". Options of its file system come from
            fsspec's configuration or from the environment. Other packages bring more, by entry points of `GROUP`, such
            as nxd-elastic "peers://...", the memory of hosts.

    Raises:
        ValueError: it is neither a path nor a URL, or the scheme of the URL is not known.
        ImportError: the package for this scheme is not installed; says which.
    """
    root = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(root, str) or not root:
        raise ValueError(f"path={path!r} is no folder of checkpoints; give a path or a URL as text or as a Path")
    if root.startswith("file://"):
        root = root.removeprefix("file://")
    if "://" not in root:
        return PosixStore(os.path.abspath(root))
    if (factory := _factory_of(root.partition("://")[0])) is not None:
        return factory(root)
    from nxd_ckpt.stores.fsspec_store import FsspecStore  # noqa: PLC0415 - fsspec takes its time to import

    return FsspecStore(root)


@functools.cache
def _factory_of(scheme: str) -> "Callable[[str], Store] | None":
    """What another package opens URLs of this scheme with; None if none does."""
    for found in entry_points(group=GROUP, name=scheme):
        factory: Callable[[str], Store] = found.load()
        return factory
    if scheme in PACKAGES:
        raise ImportError(f"checkpoints at {scheme}:// need a package: pip install {PACKAGES[scheme]}")
    return None
