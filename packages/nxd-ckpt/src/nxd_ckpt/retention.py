"""Keeps and deletes checkpoints. One process at a time calls this; saves may be in progress, except for `gc`.

Only complete checkpoints count. A checkpoint's manifest is deleted first, so an interrupted deletion leaves no partial
checkpoint, only files that `gc` finds.
"""

import math
import os
import warnings
from collections.abc import Sequence
from itertools import islice
from typing import Literal

from nxd_ckpt.arguments import check_flags
from nxd_ckpt.catalog import CheckpointInfo, check_exists, list_checkpoints, read_head
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest_text import check_digest
from nxd_ckpt.stores import Garbage, Store, check_tag, open_store
from nxd_ckpt.stores.manifests import check_files, read_text

DEAD_AFTER = 86_400.0


def delete(path: "str | os.PathLike[str]", tag: str) -> None:
    """Delete one checkpoint atomically, then free its space, even if it is the newest one or damaged.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: there is no such checkpoint, the folder is not a checkpoint, it is pinned, or its manifest
            cannot be read.
    """
    store = open_store(path)
    check_exists(store, check_tag(tag))
    if tag in store.pinned():
        raise CheckpointError(f"checkpoint {tag!r} in {store.location} is pinned; unpin it first")
    try:
        store.delete(tag)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {tag!r} in {store.location} was deleted by another process") from error


def pin(path: "str | os.PathLike[str]", tag: str) -> None:
    """Protect a checkpoint from `retain` and `delete` until `unpin`, even if it is overwritten.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: there is no such checkpoint.
    """
    store = open_store(path)
    read_head(store, check_tag(tag))
    store.set_pinned(tag, to=True)


def unpin(path: "str | os.PathLike[str]", tag: str) -> None:
    """Remove the pin of a tag, if it has one.

    Raises:
        ValueError: the tag is not allowed.
    """
    open_store(path).set_pinned(check_tag(tag), to=False)


def retain(
    path: "str | os.PathLike[str]",
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: int = 0,
    metric: str | None = None,
    best: Literal["lowest", "highest"] = "lowest",
) -> list[str]:
    """Delete the complete checkpoints that no rule keeps. Pinned checkpoints and the newest one are always kept.

    Checkpoints with missing files or files of the wrong size are incomplete: they are kept, and a warning names them.

    Args:
        path: the folder of checkpoints.
        keep_last: number of newest checkpoints to keep.
        keep_every: also keep checkpoints whose step is a multiple of this.
        keep_best: number of checkpoints with the best value of `metric` to keep as well. Checkpoints without a finite
            value are never among them; of equal ones the newer counts as better.
        metric: name of a number in `objects["metrics"]` of each save.
        best: whether the lowest or highest values are best.

    Returns:
        The deleted tags, oldest first.

    Raises:
        ValueError: a rule is invalid, or would delete the newest checkpoint.
    """
    _check_rules(keep_last, keep_every, keep_best, metric, best)
    store, checkpoints = open_store(path), list_checkpoints(path)
    judged: dict[str, bool] = {}

    def is_complete(info: CheckpointInfo) -> bool:
        if info.tag not in judged:
            judged[info.tag] = _is_complete(store, info.tag)
        return judged[info.tag]

    kept = {info.tag for info in islice(filter(is_complete, reversed(checkpoints)), keep_last)}
    kept |= {info.tag for info in checkpoints if info.pinned}
    if keep_every is not None:
        kept |= {info.tag for info in checkpoints if info.step is not None and info.step % keep_every == 0}
    if metric is not None:
        ranked = _best(checkpoints, metric, highest=best == "highest")
        kept |= {info.tag for info in islice(filter(is_complete, ranked), keep_best)}
    doomed = [info for info in checkpoints if info.tag not in kept and is_complete(info)]
    return [info.tag for info in doomed if _delete_if_unchanged(store, info)]


def gc(path: "str | os.PathLike[str]", *, dry_run: bool = False, dead_after: float = DEAD_AFTER) -> list[Garbage]:
    """Remove the remains of failed saves and deletions; checkpoints and foreign files are not touched.

    Args:
        path: the folder of checkpoints.
        dry_run: only find them.
        dead_after: in object stores, and on file systems without locks, a failed save looks like one in progress.
            There, only files that have not changed for this many seconds are removed; use more than any save takes.

    Returns:
        The files and folders found, with their sizes.

    Raises:
        ValueError: `dead_after` is not a number of at least 0, or `dry_run` is not a bool.
        CheckpointError: a save is in progress in this folder.
    """
    check_flags(dry_run=dry_run)
    if type(dead_after) not in (int, float) or not dead_after >= 0:
        raise ValueError(f"dead_after={dead_after!r} is not a number of seconds; use 0 or more")
    return open_store(path).garbage(dead_after=dead_after, delete=not dry_run)


def _check_rules(keep_last: int, keep_every: int | None, keep_best: int, metric: str | None, best: str) -> None:
    if type(keep_last) is not int:
        raise ValueError(f"keep_last={keep_last!r} is not a number of checkpoints; use an int of 1 or more")
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} would remove the newest checkpoint; use 1 or more")
    if keep_every is not None and (type(keep_every) is not int or keep_every < 1):
        raise ValueError(f"keep_every={keep_every!r} is not a number of steps; use 1 or more, or None")
    if type(keep_best) is not int:
        raise ValueError(f"keep_best={keep_best!r} is not a number of checkpoints; use an int of 0 or more")
    if metric is not None and not isinstance(metric, str):
        raise ValueError(f"metric={metric!r} is not the name of a metric; use a string such as 'loss', or None")
    if keep_best < 0 or (keep_best > 0) != (metric is not None):
        raise ValueError(f"keep_best={keep_best} and metric={metric!r} belong together: pass both or neither")
    if best not in ("lowest", "highest"):
        raise ValueError(f"best={best!r} is neither 'lowest' nor 'highest'")


def _is_complete(store: Store, tag: str) -> bool:
    """Whether a checkpoint's manifest and file sizes are right; warns if they are not."""
    try:
        head = read_head(store, tag)
        check_digest(read_text(store, tag), store.where(tag))
        check_files(store, tag, head, head.files)
    except (CheckpointError, FileNotFoundError) as error:
        warnings.warn(f"skipping an incomplete checkpoint: {error}", stacklevel=4)
        return False
    return True


def _delete_if_unchanged(store: Store, info: CheckpointInfo) -> bool:
    """Delete a checkpoint unless it was overwritten since it was listed: it may be the newest now."""
    try:
        if read_head(store, info.tag).save_id != info.save_id:
            return False
        store.delete(info.tag)
    except (CheckpointError, FileNotFoundError):  # another process has deleted it
        return False
    return True


def _best(checkpoints: Sequence[CheckpointInfo], metric: str, *, highest: bool) -> list[CheckpointInfo]:
    """Return the checkpoints with a finite value, best first; `checkpoints` are oldest first."""
    candidates = [info for info in reversed(checkpoints) if math.isfinite(info.metrics.get(metric, math.nan))]
    return sorted(candidates, key=lambda info: info.metrics[metric], reverse=highest)
