"""Folders that may lie behind URLs such as "s3://bucket/runs".

Those of the existing library's checkpoints are listed where they are, and copied to each host when they are loaded,
since their files are mapped into memory.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any

from nxd_ckpt import Coordinator
from nxd_ckpt.coordinator import gather_from_every_rank
from nxd_ckpt.interop.remote import is_remote, local_copy


def names_in(folder: str) -> list[str]:
    """Names of the files and folders in it; none if it is not there."""
    if not is_remote(folder):
        return os.listdir(folder) if os.path.isdir(folder) else []
    file_system, path = _opened(folder)
    try:
        return [entry.rstrip("/").rpartition("/")[2] for entry in file_system.ls(path, detail=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_file(path: str) -> bool:
    """Whether there is a file."""
    if not is_remote(path):
        return os.path.isfile(path)
    file_system, inner_path = _opened(path)
    return bool(file_system.isfile(inner_path))


def changed_at(path: str) -> float:
    """When a file was last written, in seconds since 1970; 0 if its store does not say."""
    if not is_remote(path):
        return os.path.getmtime(path)
    file_system, inner_path = _opened(path)
    try:
        changed: datetime = file_system.modified(inner_path)
    except NotImplementedError:
        return 0.0
    return changed.timestamp()


@contextmanager
def on_every_host(folder: str, coordinator: Coordinator) -> Iterator[str]:
    """A folder of this machine with the content of `folder`, for as long as all ranks need it. Called by all ranks.

    Each host has one copy, made by its first rank, in the system's folder for temporary files.

    Raises:
        CheckpointError: a rank could not copy it; on all ranks.
    """
    if not is_remote(folder):
        yield folder
        return
    hosts: list[str] = coordinator.all_gather_object(socket.gethostname())
    first = hosts.index(hosts[coordinator.rank])
    with ExitStack() as copies:

        def copy() -> str | None:
            return copies.enter_context(local_copy(folder)) if coordinator.rank == first else None

        copied = gather_from_every_rank(coordinator, f"copying {folder} to this host", copy)[first]
        assert copied is not None
        yield copied
        coordinator.all_gather_object(None)  # others may read on until here


def write_text(folder: str, name: str, text: str) -> None:
    """Write a file into a folder, which is made if missing."""
    file_system, path = _opened(folder)
    file_system.makedirs(path, exist_ok=True)
    with file_system.open(f"{path}/{name}", "w") as file:
        file.write(text)


def _opened(url: str) -> tuple[Any, str]:
    import fsspec  # noqa: PLC0415 - takes its time to import

    file_system, path = fsspec.core.url_to_fs(url)
    file_system.invalidate_cache()  # others may have written since
    return file_system, path
