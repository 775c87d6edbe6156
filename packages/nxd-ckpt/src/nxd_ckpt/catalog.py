"""Which checkpoints a folder holds, oldest first, and how they are thrown away again.

Order comes from the step and the commit time in the manifests, never from file times. A folder without a whole
manifest is not a checkpoint: it is neither listed nor counted nor touched.
"""

import os
import warnings
from dataclasses import dataclass

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import Manifest, decode
from nxd_ckpt.store import check_tag, discard, manifest_path, read_manifest_bytes, root_folder, tags_with_manifest


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One complete checkpoint: its tag, step, unique save id, commit time (seconds since 1970), ranks and bytes."""

    tag: str
    step: int | None
    save_id: str
    committed_at: float
    world_size: int
    num_bytes: int


def list_checkpoints(path: "str | os.PathLike[str]") -> list[CheckpointInfo]:
    """The complete checkpoints in a folder, oldest first; those without a step come before those with one.

    A damaged manifest is skipped with a warning.
    """
    root = root_folder(path)
    found: list[tuple[str, Manifest]] = []
    for tag in tags_with_manifest(root):
        try:
            found.append((tag, read_manifest(root, tag)))
        except CheckpointError as error:
            warnings.warn(f"skipping a folder that is no usable checkpoint: {error}", stacklevel=2)
    found.sort(key=lambda item: item[1].order)
    return [
        CheckpointInfo(tag, it.step, it.save_id, it.committed_at, it.world_size, sum(it.files.values()))
        for tag, it in found
    ]


def latest(path: "str | os.PathLike[str]") -> CheckpointInfo | None:
    """The newest complete checkpoint in a folder, None if there is none."""
    checkpoints = list_checkpoints(path)
    return checkpoints[-1] if checkpoints else None


def delete(path: "str | os.PathLike[str]", tag: str) -> None:
    """Removes one checkpoint: it is gone as a whole at once, then its space is freed. Called by one process.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: there is no such checkpoint, or the folder is not one.
    """
    root = root_folder(path)
    read_manifest(root, check_tag(tag))
    discard(root, tag)


def retain(path: "str | os.PathLike[str]", *, keep_last: int) -> list[str]:
    """Removes all but the newest `keep_last` complete checkpoints. Called by one process.

    Returns:
        The removed tags, oldest first.

    Raises:
        ValueError: `keep_last` is below 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} would remove the newest checkpoint; use 1 or more")
    doomed = [info.tag for info in list_checkpoints(path)[:-keep_last]]
    for tag in doomed:
        discard(root_folder(path), tag)
    return doomed


def read_manifest(root: str, tag: str) -> Manifest:
    """Reads and checks one checkpoint's manifest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    source = manifest_path(root, tag)
    try:
        content = read_manifest_bytes(root, tag)
    except (FileNotFoundError, NotADirectoryError):
        there = ", ".join(tags_with_manifest(root)) or "none"
        raise CheckpointError(f"there is no checkpoint {tag!r} in {root}; there are: {there}") from None
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error
    return decode(content, source)


def find_tag(root: str, tag: str | None) -> str:
    """The given tag, checked, or that of the newest checkpoint.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: no tag is given and there is no checkpoint.
    """
    if tag is not None:
        return check_tag(tag)
    newest = latest(root)
    if newest is None:
        raise CheckpointError(f"there is no complete checkpoint in {root}")
    return newest.tag
