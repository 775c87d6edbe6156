"""Lists the checkpoints of a folder, oldest first.

The order comes from the step, commit time and save id in the manifests, never from file times or the LATEST hint. A
folder without a complete manifest is not a checkpoint and is not listed. Only the first line of each manifest is read;
for the newest, the whole text is also compared with its digest.
"""

import math
import os
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from nxd_ckpt.arguments import check_flags
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import MANIFEST_NAME, Manifest, ManifestHead
from nxd_ckpt.manifest_text import check_digest
from nxd_ckpt.stores import Store, check_tag, manifests, open_store

_LATEST_TIME = math.nextafter(2.0**63, 0)  # the largest time that a manifest can hold


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One complete checkpoint.

    Attributes:
        tag: its name.
        step: the `step` passed to `save`, if any.
        save_id: unique to the save that wrote it.
        committed_at: seconds since 1970.
        world_size: number of ranks that saved it.
        num_bytes: size of its data, without data that it references in other checkpoints.
        metrics: the numbers in `objects["metrics"]`, by name.
        pinned: whether it is pinned by `pin`.
    """

    tag: str
    step: int | None
    save_id: str
    committed_at: float
    world_size: int
    num_bytes: int
    metrics: Mapping[str, float]
    pinned: bool


def list_checkpoints(path: "str | os.PathLike[str]") -> list[CheckpointInfo]:
    """List the complete checkpoints in a folder, oldest first; those without a step come before those with one.

    A damaged manifest is skipped with a warning. Only the newest manifest is checked beyond its first line and size.
    """
    return _list(open_store(path))


def complete_tags(store: Store) -> list[str]:
    """Return the tags of the complete checkpoints, oldest first; a damaged manifest is skipped with a warning."""
    return [info.tag for info in _list(store)]


def latest(path: "str | os.PathLike[str]", *, fallback: bool = False) -> CheckpointInfo | None:
    """Return the newest checkpoint in a folder, or None if the folder has no checkpoints.

    Args:
        path: the folder of checkpoints.
        fallback: skip checkpoints whose manifest cannot be read, with a warning, as `load` does.

    Raises:
        CheckpointError: a manifest is damaged or has an unknown version, so that checkpoint may be the newest. With
            `fallback`: there are checkpoints, but none of their manifests can be read.
    """
    check_flags(fallback=fallback)
    store = open_store(path)
    if not fallback:
        return _newest(store, "pass fallback=True to skip it, or move it elsewhere")
    checkpoints = _list(store)
    if not checkpoints and (unusable := store.tags()):
        raise CheckpointError(
            f"no checkpoint in {store.location} can be read: {', '.join(unusable)}; move them elsewhere to start anew"
        )
    return checkpoints[-1] if checkpoints else None


def newest_readable(store: Store) -> tuple[str, Manifest] | None:
    """Return the tag and manifest of the newest checkpoint with a readable manifest, or None if there are none."""
    found, _ = manifests.read_heads(store)
    for tag, _ in reversed(found):
        with suppress(CheckpointError, FileNotFoundError):
            return tag, manifests.read_manifest(store, tag)
    return None


def next_commit_time(store: Store) -> float:
    """Return the time for a commit: now, but later than every commit in the folder, even if the clock was set back."""
    found, _ = manifests.read_heads(store)
    last = max((head.committed_at for _, head in found), default=-math.inf)
    now = time.time()
    return now if now > last else min(math.nextafter(last, math.inf), _LATEST_TIME)


def read_manifest(store: Store, tag: str) -> Manifest:
    """Read and check one checkpoint's manifest.

    Raises:
        CheckpointError: there is no such checkpoint, or its manifest is damaged.
    """
    try:
        return manifests.read_manifest(store, tag)
    except FileNotFoundError:
        raise _is_not_there(store, tag) from None


def read_head(store: Store, tag: str) -> ManifestHead:
    """Read and check the first line of one checkpoint's manifest; raises the errors of `read_manifest`."""
    try:
        return manifests.read_head(store, tag)
    except FileNotFoundError:
        raise _is_not_there(store, tag) from None


def check_exists(store: Store, tag: str) -> None:
    """Check that there is a manifest, in whatever state.

    Raises:
        CheckpointError: there is none.
    """
    try:
        store.file_size(tag, MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError):
        raise _is_not_there(store, tag) from None
    except (OSError, CheckpointError):  # it exists, but cannot be read
        pass


def _is_not_there(store: Store, tag: str) -> CheckpointError:
    there = ", ".join(store.tags()) or "none"
    return CheckpointError(f"there is no checkpoint {tag!r} in {store.location}; available: {there}{_instead(store)}")


def _instead(store: Store) -> str:
    """Describe what the path holds instead of checkpoints, to append to an error; "" if unknown."""
    path = store.location
    if "://" in path:
        return ""
    if not os.path.isdir(path):
        if os.path.islink(path) and not os.path.exists(path):
            return f"; it is a link to {os.readlink(path)}, which does not exist"
        return "; it is not a folder" if os.path.exists(path) else ""
    names = set(os.listdir(path))
    found = ""
    if MANIFEST_NAME in names:
        parent, tag = os.path.split(path)
        found = f"; it is itself a checkpoint: pass {parent!r} as the path and {tag!r} as the tag"
    elif ".metadata" in names:
        found = "; it is a torch.distributed.checkpoint folder: see nxd_ckpt.interop.open_torch_dcp"
    elif any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        found = "; it is a folder of safetensors files: see nxd_ckpt.interop.open_hugging_face"
    return found


def find_tag(store: Store, tag: str | None) -> str:
    """Return the given tag after checking it, or the tag of the newest checkpoint.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: no tag is given, and there is no checkpoint, or a damaged manifest may be the newest.
    """
    if tag is not None:
        return check_tag(tag)
    newest = _newest(store, "pass the tag of another one, load with fallback=True, or move it elsewhere")
    if newest is None:
        raise CheckpointError(f"there is no complete checkpoint in {store.location}{_instead(store)}")
    return newest.tag


def _newest(store: Store, advice: str) -> CheckpointInfo | None:
    """Return the newest checkpoint. A damaged manifest is an error, since it might be the newest of all."""
    checkpoints, problems = _survey(store)
    if problems:
        raise CheckpointError(
            f"cannot determine the newest checkpoint in {store.location}: {'; '.join(problems)}; {advice}"
        )
    return checkpoints[-1] if checkpoints else None


def _list(store: Store) -> list[CheckpointInfo]:
    checkpoints, problems = _survey(store)
    for problem in problems:
        warnings.warn(f"skipping an unusable checkpoint: {problem}", stacklevel=3)
    return checkpoints


def _survey(store: Store) -> tuple[list[CheckpointInfo], list[str]]:
    """Return the complete checkpoints, oldest first, and the problems of others; verifies the newest manifest fully."""
    found, problems = manifests.read_heads(store)
    while found:
        tag = found[-1][0]
        try:
            check_digest(manifests.read_text(store, tag), store.where(tag))
            break
        except FileNotFoundError:  # deleted meanwhile
            pass
        except CheckpointError as error:
            problems.append(str(error))
        found.pop()
    pinned = store.pinned()
    checkpoints = [
        CheckpointInfo(
            tag=tag,
            step=head.step,
            save_id=head.save_id,
            committed_at=head.committed_at,
            world_size=head.world_size,
            num_bytes=sum(head.own_files.values()),
            metrics=head.metrics,
            pinned=tag in pinned,
        )
        for tag, head in found
    ]
    return checkpoints, problems
