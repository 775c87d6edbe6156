"""Storage of checkpoints: one small interface, and its implementations.

`open_store` chooses one by the form of the path; each kind has a file of its own.
"""

import os
import socket
from collections.abc import Collection

from nxd_ckpt.peers.store import PeerStore, lies_in_memory
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
            fsspec's configuration or from the environment. "peers://..." is the memory of hosts, see
            `nxd_ckpt.peers.store.peers_url`.

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
    if lies_in_memory(root):
        return PeerStore(root)
    from nxd_ckpt.stores.fsspec_store import FsspecStore  # noqa: PLC0415 - fsspec takes its time to import

    return FsspecStore(root)
