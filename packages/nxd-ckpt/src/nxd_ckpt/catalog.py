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
        num_bytes: of its data.
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


def latest(path: "str | os.PathLike[str]") -> CheckpointInfo | None:
    """The newest complete checkpoint in a folder, None if there is none."""
    checkpoints = list_checkpoints(path)
    return checkpoints[-1] if checkpoints else None


def read_manifest(store: Store, tag: str) -> Manifest:
    """Reads and checks one checkpoint's manifest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    source = store.where(tag)
    try:
        content = store.read_manifest(tag)
    except FileNotFoundError:
        there = ", ".join(store.tags()) or "none"
        raise CheckpointError(f"there is no checkpoint {tag!r} in {store.location}; there are: {there}") from None
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error
    return decode(content, source)


def find_tag(store: Store, tag: str | None) -> str:
    """The given tag, checked, or that of the newest checkpoint.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: no tag is given and there is no checkpoint.
    """
    if tag is not None:
        return check_tag(tag)
    checkpoints = _list(store)
    if not checkpoints:
        raise CheckpointError(f"there is no complete checkpoint in {store.location}")
    return checkpoints[-1].tag


def newest_first(store: Store) -> list[str]:
    """Tags of the complete checkpoints."""
    return [info.tag for info in reversed(_list(store))]


def _list(store: Store) -> list[CheckpointInfo]:
    found: list[tuple[str, Manifest]] = []
    for tag in store.tags():
        try:
            found.append((tag, read_manifest(store, tag)))
        except CheckpointError as error:
            warnings.warn(f"skipping a folder that is no usable checkpoint: {error}", stacklevel=3)
    found.sort(key=lambda item: item[1].order)
    pinned = store.pinned()
    return [
        CheckpointInfo(
            tag=tag,
            step=it.step,
            save_id=it.save_id,
            committed_at=it.committed_at,
            world_size=it.world_size,
            num_bytes=sum(it.files.values()),
            metrics=_metrics(it.objects),
            pinned=tag in pinned,
        )
        for tag, it in found
    ]


def _metrics(objects: Any) -> dict[str, float]:
    metrics = objects.get("metrics") if isinstance(objects, dict) else None
    numbers = metrics.items() if isinstance(metrics, dict) else ()
    return {
        name: value for name, value in numbers if type(value) is float or (type(value) is int and abs(value) < 2**53)
    }
