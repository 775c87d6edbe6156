"""Finds checkpoints by tag or age, detects their format, and deletes old ones; in folders or behind URLs.

Folders of NeuronX Distributed are detected by their marker files (v2) or their ranks' names (v1). Behind a URL such
as "s3://bucket/runs" they are listed in place, and copied to each host when they are loaded, since their files are
mapped into memory.
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from datetime import datetime
from typing import Any, Literal

import nxd_ckpt
from nxd_ckpt import Checkpoint, CheckpointError, Coordinator
from nxd_ckpt.coordinator import coordinator_for, gather_from_every_rank, on_every_rank, on_rank_zero
from nxd_ckpt.files import is_remote, local_copy
from nxd_ckpt.stores import open_store

KEEP_ALL = -1

_V1_RANK = re.compile(r"tp_rank_\d+(_pp_rank_\d+)?(_dp_rank_\d+)?")
_V2_MARKERS = ("checkpoint", "done")  # the second is written last


@dataclass(frozen=True)
class Found:
    """One complete checkpoint.

    Attributes:
        root: the folder that holds it under its tag; for v1, which has no tags, the folder itself.
        tag: its name; "" for v1.
        layout: its format.
    """

    root: str
    tag: str
    layout: Literal["nxd", "v1", "v2"]

    @property
    def folder(self) -> str:
        """The checkpoint's folder, a path or a URL."""
        return os.path.join(self.root, self.tag) if self.tag else self.root


def choose_tag(path: str | os.PathLike[str], tag: str) -> tuple[str, str, int | None]:
    """Return folder, tag and step to save to; without a tag, the path itself becomes the checkpoint.

    The step is that of the newest checkpoint there, such as one of `nxd train`, so that the new one counts as newer.
    """
    folder = _folder(path)
    there = nxd_ckpt.list_checkpoints(folder)
    if not is_untagged(tag):
        return folder, tag, there[-1].step if there else None
    if there:
        tags = ", ".join(info.tag for info in there[-3:])
        raise ValueError(f"{folder} holds the checkpoints {tags}; pass tag= for a new one")
    return *_split(folder), None


def is_untagged(tag: str | None) -> bool:
    """Whether no tag is given, so that the path itself or the newest checkpoint in it is meant.

    Raises:
        ValueError: the tag is not a string; a number 0 must not be mistaken for a missing tag.
    """
    if not isinstance(tag, str | None):
        raise ValueError(f"tag={tag!r} is a {type(tag).__name__}; pass a string, such as 'step_{tag}'")
    return not tag


class NothingSavedError(CheckpointError):
    """A folder holds no complete checkpoint, whatever its tag."""


def find_checkpoint(path: str | os.PathLike[str], tag: str | None) -> Found:
    """Return the checkpoint of this tag, or the newest complete one, or the one that the path itself names.

    Raises:
        ValueError: the path or the tag is not allowed.
        CheckpointError: there is none (`NothingSavedError` if no tag is given); or no tag is given, and a damaged
            checkpoint of ours may be the newest.
    """
    root = _folder(path).removeprefix("file://")
    if os.path.isfile(root):
        raise CheckpointError(f"{root} is a file; pass the folder that checkpoints were saved to")
    if (tag is not None and not is_untagged(tag)) or not open_store(root).capabilities.other_files:
        return _of_tag(root, tag)
    newest = nxd_ckpt.latest(root)
    if newest is not None:
        return Found(root, newest.tag, "nxd")
    if _is_v1(root):
        return Found(root, "", "v1")
    legacy = _complete_tags(root)
    if legacy:
        return Found(root, max(legacy, key=lambda name: _legacy_age(root, name)), "v2")
    parent, name = _split(root)
    if name and _is_complete(parent, name):
        return Found(parent, name, "v2")
    if name and _is_own(parent, name):
        return Found(parent, name, "nxd")
    problem = f"there is no complete checkpoint in {root}" if os.path.exists(root) else f"{root} does not exist"
    raise NothingSavedError(
        f"{problem}; pass the folder that checkpoints were saved to, that of a run of "
        "nxd train, or that of a Hugging Face model, with its config.json"
    )


def has_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a complete checkpoint, of this library or the existing one.

    Raises:
        CheckpointError: one is damaged; the caller must decide whether to start without it.
    """
    root = _folder(path).removeprefix("file://")
    if not os.path.isfile(root) and nxd_ckpt.latest(root) is not None:
        return True
    try:
        find_checkpoint(path, None)
    except CheckpointError:
        return False
    return True


def delete_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove the checkpoint that this path names. Called by one rank.

    Raises:
        CheckpointError: there is no such checkpoint, or it is pinned.
    """
    nxd_ckpt.delete(*_split(_folder(path)))


def open_own(path: str | os.PathLike[str], tag: str | None) -> Checkpoint:
    """Open a checkpoint of this library, chosen like in `find_checkpoint`, for one process to read.

    Raises:
        ValueError: the path or the tag is not allowed.
        CheckpointError: there is none, or it was written by NeuronX Distributed.
    """
    found = _find_own(path, tag)
    return nxd_ckpt.open_checkpoint(found.root, found.tag)


def open_own_together(path: str | os.PathLike[str], tag: str | None) -> Checkpoint:
    """Like `open_own`, but opens the same checkpoint on all ranks: the first one chooses it. Called by all ranks.

    Raises:
        ValueError: as for `open_own`, with a single rank.
        CheckpointError: there is none, it was written by NeuronX Distributed, or it was replaced meanwhile; on all
            ranks.
    """
    coordinator = coordinator_for(None)
    if coordinator.world_size == 1:
        return open_own(path, tag)
    doing = f"looking for a checkpoint in {path}"
    found = Found(*on_rank_zero(coordinator, doing, lambda: astuple(_find_own(path, tag))))
    doing = f"opening checkpoint {found.folder}"
    checkpoint = on_every_rank(coordinator, doing, lambda: nxd_ckpt.open_checkpoint(found.root, found.tag))
    if len(set(coordinator.all_gather_object(checkpoint.save_id))) > 1:
        raise CheckpointError(f"{doing} failed: it was replaced while the ranks were opening it; open it again")
    return checkpoint


def check_kept(num_kept_ckpts: int | None) -> int:
    """Return the number of checkpoints to keep, `KEEP_ALL` for None."""
    kept = KEEP_ALL if num_kept_ckpts is None else num_kept_ckpts
    if type(kept) is not int or (kept < 1 and kept != KEEP_ALL):
        raise ValueError(f"num_kept_ckpts={num_kept_ckpts!r} is not a number of checkpoints; use 1 or more, or None")
    return kept


def keep_newest(root: str, num_kept: int) -> None:
    """Remove all but the newest checkpoints; called by one rank, after a commit. Pinned ones and other folders stay."""
    if num_kept != KEEP_ALL:
        nxd_ckpt.retain(root, keep_last=num_kept)


def _find_own(path: str | os.PathLike[str], tag: str | None) -> Found:
    found = find_checkpoint(path, tag)
    if found.layout != "nxd":
        raise CheckpointError(
            f"{found.folder} is a checkpoint of NeuronX Distributed, which does not say which model it holds; load it "
            "into that model with load_checkpoint and save it again, or use nxd-ckpt convert"
        )
    return found


def _folder(path: str | os.PathLike[str]) -> str:
    folder = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(folder, str) or not folder:
        raise ValueError(f"path={path!r} is not a folder of checkpoints; pass a path or a URL")
    return folder


def _split(path: str) -> tuple[str, str]:
    """Return folder and tag of a path that names the checkpoint itself."""
    if "://" not in path:
        return os.path.split(os.path.abspath(path))
    root, _, tag = path.rstrip("/").rpartition("/")
    return root, tag


def _of_tag(root: str, tag: str | None) -> Found:
    if tag is None or not open_store(root).capabilities.other_files:  # then all are ours
        return Found(root, nxd_ckpt.open_checkpoint(root, tag or None).tag, "nxd")
    if "/" not in tag and _is_complete(root, tag):
        return Found(root, tag, "v2")
    if "/" not in tag and _is_v1(os.path.join(root, tag)):
        return Found(os.path.join(root, tag), "", "v1")
    return Found(root, nxd_ckpt.open_checkpoint(root, tag).tag, "nxd")


def _is_own(root: str, tag: str) -> bool:
    try:
        nxd_ckpt.open_checkpoint(root, tag)
    except (CheckpointError, ValueError):  # the folder's name may not be a valid tag
        return False
    return True


def _is_v1(folder: str) -> bool:
    return any(map(_V1_RANK.fullmatch, _names_in(folder)))


def _complete_tags(folder: str) -> list[str]:
    return [name for name in _names_in(folder) if _is_complete(folder, name)]


def _is_complete(folder: str, tag: str) -> bool:
    return all(_is_file(os.path.join(folder, tag, marker)) for marker in _V2_MARKERS)


def _legacy_age(root: str, tag: str) -> tuple[float, list[int], str]:
    """Order by the marker's time, as that library does; if times are equal, as in a copied folder, by tags' numbers."""
    numbers = [int(digits) for digits in re.findall(r"\d+", tag)]
    return _changed_at(os.path.join(root, tag, _V2_MARKERS[1])), numbers, tag


def _names_in(folder: str) -> list[str]:
    """Return the names of the files and folders in a folder; none if it does not exist."""
    if not is_remote(folder):
        return os.listdir(folder) if os.path.isdir(folder) else []
    file_system, path = open_folder(folder)
    try:
        return [entry.rstrip("/").rpartition("/")[2] for entry in file_system.ls(path, detail=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_file(path: str) -> bool:
    """Whether there is a file."""
    if not is_remote(path):
        return os.path.isfile(path)
    file_system, inner_path = open_folder(path)
    return bool(file_system.isfile(inner_path))


def _changed_at(path: str) -> float:
    """Return when a file was last written, in seconds since 1970; 0 if its store does not say."""
    if not is_remote(path):
        return os.path.getmtime(path)
    file_system, inner_path = open_folder(path)
    try:
        changed: datetime = file_system.modified(inner_path)
    except NotImplementedError:
        return 0.0
    return changed.timestamp()


@contextmanager
def on_every_host(folder: str, coordinator: Coordinator) -> Iterator[str]:
    """Provide `folder`'s content in a folder on this machine while any rank needs it. Called by all ranks.

    Each host has one copy, made by its first rank, in the system's temporary folder.

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
        coordinator.all_gather_object(None)  # other ranks may still be reading until here


def write_text(folder: str, name: str, text: str) -> None:
    """Write a file into a folder, which is created if missing."""
    file_system, path = open_folder(folder)
    file_system.makedirs(path, exist_ok=True)
    with file_system.open(f"{path}/{name}", "w") as file:
        file.write(text)


def open_folder(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a folder or URL, and the path in it; creates nothing.

    Raises:
        ValueError: the scheme of the URL is unknown.
        ImportError: the package for this scheme is not installed.
    """
    import fsspec  # noqa: PLC0415 - slow to import

    file_system, path = fsspec.core.url_to_fs(url)
    file_system.invalidate_cache()  # others may have written since
    return file_system, path
