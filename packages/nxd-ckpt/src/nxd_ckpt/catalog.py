"""Lists the checkpoints of a folder, oldest first.

Order comes from the step, the commit time and the save id in the manifests, never from file times or from the hint
LATEST. A folder without a whole manifest is not a checkpoint: it is neither listed nor counted.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import Manifest, decode
from nxd_ckpt.stores import Store, check_tag, open_store


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One complete checkpoint.

    Attributes:
        tag: its name.
        step: the step it was saved at, if that was given.
        save_id: unique to the save that wrote it.
        committed_at: seconds since 1970.
        world_size: how many ranks saved it.
        num_bytes: of its data, without what it references in other checkpoints.
        metrics: the numbers in `objects["metrics"]`, by name.
        pinned: whether `pin` keeps it.
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
    """The complete checkpoints in a folder, oldest first; those without a step come before those with one.

    A damaged manifest is skipped with a warning.
    """
    return _list(open_store(path))


def complete_tags(store: Store) -> list[str]:
    """Their tags, oldest first; a damaged manifest is skipped with a warning."""
    return [info.tag for info in _list(store)]


def latest(path: "str | os.PathLike[str]") -> CheckpointInfo | None:
    """The newest checkpoint in a folder, None if there is none.

    Raises:
        CheckpointError: the manifest of one is damaged or of another version, so that may be the newest.
    """
    return _newest(open_store(path))


def newest_readable(store: Store) -> tuple[str, Manifest] | None:
    """Tag and manifest of the newest checkpoint whose manifest can be read, None if there is none."""
    found, _ = _manifests(store)
    return found[-1] if found else None


def read_manifest(store: Store, tag: str) -> Manifest:
    """Reads and checks one checkpoint's manifest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        return _read_manifest(store, tag)
    except FileNotFoundError:
        there = ", ".join(store.tags()) or "none"
        raise CheckpointError(f"there is no checkpoint {tag!r} in {store.location}; there are: {there}") from None


def find_tag(store: Store, tag: str | None) -> str:
    """The given tag, checked, or that of the newest checkpoint.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: no tag is given, and there is no checkpoint or a manifest that may be the newest is damaged.
    """
    if tag is not None:
        return check_tag(tag)
    newest = _newest(store)
    if newest is None:
        raise CheckpointError(f"there is no complete checkpoint in {store.location}")
    return newest.tag


def _newest(store: Store) -> CheckpointInfo | None:
    """A damaged manifest does not say how new it is, so the newest of the others may not be the newest of all."""
    checkpoints, problems = _survey(store)
    if problems:
        raise CheckpointError(
            f"the newest checkpoint in {store.location} cannot be told: {'; '.join(problems)}; give the tag of another "
            "one, move what is damaged elsewhere, or load with fallback=True"
        )
    return checkpoints[-1] if checkpoints else None


def _list(store: Store) -> list[CheckpointInfo]:
    checkpoints, problems = _survey(store)
    for problem in problems:
        warnings.warn(f"skipping a folder that is no usable checkpoint: {problem}", stacklevel=3)
    return checkpoints


def _manifests(store: Store) -> tuple[list[tuple[str, Manifest]], list[str]]:
    """Tags and manifests, oldest first, and why others cannot be used; those deleted meanwhile are neither."""
    found: list[tuple[str, Manifest]] = []
    problems: list[str] = []
    for tag in store.tags():
        try:
            found.append((tag, _read_manifest(store, tag)))
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            problems.append(str(error))
    found.sort(key=lambda item: item[1].order)
    return found, problems


def _survey(store: Store) -> tuple[list[CheckpointInfo], list[str]]:
    """The complete checkpoints, oldest first, and why others are not."""
    found, problems = _manifests(store)
    pinned = store.pinned()
    checkpoints = [
        CheckpointInfo(
            tag=tag,
            step=it.step,
            save_id=it.save_id,
            committed_at=it.committed_at,
            world_size=it.world_size,
            num_bytes=sum(it.own_files.values()),
            metrics=_metrics(it.objects),
            pinned=tag in pinned,
        )
        for tag, it in found
    ]
    return checkpoints, problems


def _read_manifest(store: Store, tag: str) -> Manifest:
    source = store.where(tag)
    try:
        content = store.read_manifest(tag)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error
    return decode(content, source)


def _metrics(objects: Any) -> dict[str, float]:
    metrics = objects.get("metrics") if isinstance(objects, dict) else None
    numbers = metrics.items() if isinstance(metrics, dict) else ()
    return {
        name: value for name, value in numbers if type(value) is float or (type(value) is int and abs(value) < 2**53)
    }
