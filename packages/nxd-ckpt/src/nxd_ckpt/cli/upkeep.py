"""`nxd-ckpt retain`, `delete`, `gc`, `pin` and `unpin` clean up a folder of checkpoints."""

from dataclasses import asdict
from typing import Any

from nxd_ckpt.cli.report import Report, check_folder, human_size, table
from nxd_ckpt.retention import delete, gc, pin, retain, unpin


def collect_garbage(path: str, *, dry_run: bool) -> Report:
    """Removes, or only lists, the remains of failed saves and deletions.

    Raises:
        CheckpointError: there is no such folder, or a save is in progress.
    """
    check_folder(path)
    found = gc(path, dry_run=dry_run)
    total = sum(item.num_bytes for item in found)
    done = "would free" if dry_run else "freed"
    lines = [*(table([(item.path, human_size(item.num_bytes)) for item in found]) if found else [])]
    lines.append(f"{done} {human_size(total)} in {len(found)} places")
    return Report({"dry_run": dry_run, "bytes": total, "garbage": [asdict(item) for item in found]}, lines)


def set_pinned(path: str, tag: str, *, to: bool) -> Report:
    """Pins or unpins a checkpoint.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: there is no such folder, or no such checkpoint to pin.
    """
    check_folder(path)
    (pin if to else unpin)(path, tag)
    return Report({"tag": tag, "pinned": to}, [f"{tag} is {'pinned' if to else 'not pinned'}"])


def retain_newest(path: str, **rules: Any) -> Report:
    """Removes the checkpoints that no rule keeps; takes the rules of `nxd_ckpt.retain`.

    Raises:
        ValueError: a rule is invalid.
        CheckpointError: there is no such folder.
    """
    check_folder(path)
    removed = retain(path, **rules)
    return Report({"removed": removed}, [f"removed {', '.join(removed)}" if removed else "removed nothing"])


def delete_one(path: str, tag: str) -> Report:
    """Removes one checkpoint.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: there is no such folder or checkpoint, or it is pinned.
    """
    check_folder(path)
    delete(path, tag)
    return Report({"removed": [tag]}, [f"removed {tag}"])
