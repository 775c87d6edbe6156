"""`nxd-ckpt inspect` shows a checkpoint's contents as a tree; `nxd-ckpt list` lists the checkpoints in a folder."""

import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from nxd_ckpt.catalog import list_checkpoints
from nxd_ckpt.cli.formats import Opened, Place, opened
from nxd_ckpt.cli.report import Report, check_folder, human_size, table
from nxd_ckpt.errors import printable
from nxd_ckpt.interop.source import num_bytes
from nxd_ckpt.reader import Checkpoint
from nxd_ckpt.training_state import PER_RANK, VALUES_FILE, read_values

LONGEST_VALUE = 60  # characters of a value that is shown
_WRITER = re.compile(r".*-(\d+)-\d+\.safetensors")
_SEPARATOR = re.compile(r"(?<=[./])")

# A node of the tree: its children by name, or a tensor's description.
Node = dict[str, Any]


def inspect_checkpoint(place: Place, *, depth: int | None) -> Report:
    """Describe one checkpoint; tree levels below `depth` are summarized.

    Of a NeuronX checkpoint without a sharding, the shapes are those in the ranks' files.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    with opened(place if place.sharding is not None else replace(place, sharding={})) as found:
        tensors = describe_tensors(found)
        about = describe_checkpoint(found.checkpoint) if found.checkpoint else {}
        total = sum(entry["bytes"] for entry in tensors.values())
        data = {"kind": found.kind, **about, "num_tensors": len(tensors), "bytes": total, "tensors": tensors}
        objects = found.source.objects
        if isinstance(objects, dict):
            data["objects"] = [_described(name, objects[name]) for name in sorted(objects)]
        if found.kind == "neuronx" and place.sharding is None:
            data["shapes"] = "in each rank's file; --sharding llama, or a JSON file, shows those of whole tensors"
    head = [
        f"{key}: {printable(shown(value))}"
        for key, value in data.items()
        if key not in ("tensors", "bytes", "files", "references")
    ]
    lines = [*head, f"size: {human_size(total)}", ""]
    lines += table(_tree_rows(as_tree(tensors), depth=depth) or [("no tensors",)])
    if "files" in data:
        owners = {file: f"in {tag}" for file, tag in data["references"].items()}
        rows: list[tuple[str, ...]] = [(it, human_size(size), owners.get(it, "")) for it, size in data["files"].items()]
        lines += ["", *table(rows or [("no files",)])]
    return Report(data, lines)


def list_folder(path: str) -> Report:
    """List the complete checkpoints in a folder, oldest first.

    Raises:
        CheckpointError: there is no such folder.
    """
    check_folder(path)
    found = list_checkpoints(path)
    rows: list[tuple[object, ...]] = [("TAG", "STEP", "COMMITTED (UTC)", "RANKS", "SIZE", "", "")]
    for info in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(info.committed_at))
        step = "-" if info.step is None else info.step
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in info.metrics.items())
        pinned = "pinned" if info.pinned else ""
        rows.append((info.tag, step, when, info.world_size, human_size(info.num_bytes), pinned, metrics))
    nothing = f"no complete checkpoint of nxd-ckpt in {path}; nxd-ckpt inspect {path} says what else it holds"
    return Report([asdict(info) for info in found], table(rows) if found else [nothing])


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe a checkpoint, without its tensors."""
    manifest = checkpoint.manifest
    return {
        "tag": checkpoint.tag,
        "step": checkpoint.step,
        "save_id": checkpoint.save_id,
        "committed_at": manifest.committed_at,
        "world_size": checkpoint.world_size,
        "mesh": checkpoint.mesh,
        "extra": checkpoint.extra,
        "values": _values(checkpoint),
        "of_each_rank": _of_each_rank(checkpoint),
        "files": dict(manifest.files),
        "references": dict(manifest.references),
    }


def _values(checkpoint: Checkpoint) -> list[str]:
    """Return the parts of a state that are not tensors, such as a scheduler's, with their value if it is short."""
    if VALUES_FILE not in checkpoint.extra:
        return []
    return [_described(path, value) for path, value in read_values(checkpoint.read_extra(VALUES_FILE)).items()]


def _of_each_rank(checkpoint: Checkpoint) -> list[str]:
    """Return the names of what ranks saved of their own, such as random states, with the number of ranks."""
    count: Counter[str] = Counter()
    for objects in checkpoint.rank_objects.values():
        names = dict(objects) if isinstance(objects, dict) else {"rank_objects": objects}
        of_state = names.pop(PER_RANK, {})
        count.update([*names, *(of_state if isinstance(of_state, dict) else [])])
    return [f"{name} ({ranks} ranks)" for name, ranks in count.items()]


def _described(name: str, value: Any) -> str:
    text = json.dumps(value)
    return f"{name}={text}" if len(text) <= LONGEST_VALUE else name


def describe_tensors(found: Opened) -> dict[str, dict[str, Any]]:
    """Return the dtype, shape and bytes of each tensor, and for nxd checkpoints the ranks that wrote it."""
    entries = {}
    for name, info in found.source.tensors.items():
        entry = {"dtype": str(info.dtype).removeprefix("torch."), "shape": list(info.global_shape)}
        entries[name] = entry | {"bytes": num_bytes(info)}
        if found.checkpoint is not None:
            files = {chunk.file for chunk in found.checkpoint.manifest.tensors[name].chunks}
            entries[name]["written_by"] = sorted(
                {int(match[1]) for file in files if (match := _WRITER.fullmatch(file))}
            )
    return entries


def as_tree(tensors: Mapping[str, Mapping[str, Any]]) -> Node:
    """Arrange tensors in a tree by the parts of their names."""
    root: Node = {}
    for name, entry in tensors.items():
        *parents, last = _SEPARATOR.split(name)
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = entry
    return root


def _tree_rows(node: Node, *, depth: int | None, level: int = 0) -> list[tuple[str, str, str, str, str]]:
    rows = []
    for name, child in node.items():
        label, inner = name, child
        while not is_tensor(inner) and len(inner) == 1:  # a chain of single names is one line
            (part, inner), *_ = inner.items()
            label += part
        label = "  " * level + (label.rstrip("./") or label)
        if is_tensor(inner):
            writers = _ranges(inner["written_by"]) if "written_by" in inner else ""
            rows.append((label, inner["dtype"], str(inner["shape"]), human_size(inner["bytes"]), writers))
            continue
        count, size = sum_up(inner)
        rows.append((label, "", f"{count} tensors", human_size(size), ""))
        if depth is None or level + 1 < depth:
            rows.extend(_tree_rows(inner, depth=depth, level=level + 1))
    return rows


def sum_up(node: Node) -> tuple[int, int]:
    """Return the number of tensors at and below a node, and their total bytes."""
    if is_tensor(node):
        return 1, node["bytes"]
    parts = [sum_up(child) for child in node.values()]
    return sum(count for count, _ in parts), sum(size for _, size in parts)


def is_tensor(node: Node) -> bool:
    """Whether a node is a tensor's description."""
    return not isinstance(node.get("bytes", {}), dict)


def _ranges(ranks: list[int]) -> str:
    """Format ranks as "rank 0" or "ranks 0-3,6"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    text = ",".join("-".join(map(str, part)) for part in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}" if ranks else ""


def shown(value: Any) -> str:
    """Format a value for people."""
    if isinstance(value, float):
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
