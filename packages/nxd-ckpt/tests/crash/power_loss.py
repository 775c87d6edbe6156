"""What a disk may hold after the power failed, worked out from the system calls that were made until then.

POSIX promises little: a file's bytes are there once the file was fsynced, a folder's entries once the folder was. Of
everything else any part may be there or not: a name without its bytes, a later change without an earlier one. Here a
rename is all or nothing, and durable once the folder it went into is fsynced; that much every file system keeps.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .system_calls import Call


@dataclass(eq=False)
class File:
    content: bytes = b""
    durable: bytes = b""


@dataclass(eq=False)
class Folder:
    entries: "dict[str, File | Folder]" = field(default_factory=dict)
    durable: "dict[str, File | Folder]" = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Change:
    """Entries that come or go together: (folder, name, what is there then), durable once `settles_with` is synced."""

    entries: "tuple[tuple[Folder, str, File | Folder | None], ...]"
    settles_with: Folder


class Disk:
    """A folder and all below it, as the running system sees it, and what of it is safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._root = _read(path)
        self._pending: list[Change] = []

    def apply(self, call: Call) -> None:
        """Follows one call; those outside the folder are ignored."""
        if call.failed or not self._has(call.path):
            return
        if call.name == "fsync":
            self._sync(self._find(call.path))
        elif call.name == "write":
            self._find(call.path).content += call.data
        elif call.name == "ftruncate":  # to nothing, from when the old bytes may be gone
            file = self._find(call.path)
            file.content = file.durable = b""
        elif call.name in ("mkdir", "open"):
            folder, name = self._place(call.path)
            if name not in folder.entries:
                self._change(Change(((folder, name, Folder() if call.name == "mkdir" else File()),), folder))
        elif call.name in ("unlink", "rmdir", "remove"):
            folder, name = self._place(call.path)
            self._change(Change(((folder, name, None),), folder))
        elif call.name in ("rename", "replace"):
            (source, name), (target, new_name) = self._place(call.path), self._place(call.target)
            moved = source.entries[name]
            self._change(Change(((source, name, None), (target, new_name, moved)), target))
        else:
            raise NotImplementedError(f"this model of a disk does not know {call}")

    def states_after_power_loss(self) -> "Iterator[dict[str, bytes | None]]":
        """Each distinct possibility as {relative path: content, None for a folder}."""
        seen = set()
        for changes in _selections(self._pending):
            for part_of_unsynced in (0.0, 0.5, 1.0):
                state: dict[str, bytes | None] = {}
                _collect(self._root, "", _overlay(changes), part_of_unsynced, state)
                key = hashlib.sha256(repr(sorted(state.items())).encode()).digest()
                if key not in seen:
                    seen.add(key)
                    yield state

    def _has(self, path: str) -> bool:
        return path == str(self._path) or path.startswith(f"{self._path}/")

    def _find(self, path: str) -> "File | Folder":
        node = self._root
        for part in Path(path).relative_to(self._path).parts:
            node = node.entries[part]
        return node

    def _place(self, path: str) -> "tuple[Folder, str]":
        return self._find(os.path.dirname(path)), os.path.basename(path)

    def _change(self, change: Change) -> None:
        for folder, name, node in change.entries:
            _set(folder.entries, name, node)
        self._pending.append(change)

    def _sync(self, node: "File | Folder") -> None:
        if isinstance(node, File):
            node.durable = node.content
            return
        for change in [change for change in self._pending if change.settles_with is node]:
            for folder, name, entry in change.entries:
                _set(folder.durable, name, entry)
            self._pending.remove(change)


def write_state(state: "dict[str, bytes | None]", path: Path) -> None:
    """Makes a folder that holds it."""
    path.mkdir()
    for name, content in sorted(state.items()):
        if content is None:
            (path / name).mkdir()
        else:
            (path / name).write_bytes(content)


def _selections(pending: Sequence[Change]) -> Iterator[list[Change]]:
    """None, all, each alone, all but each, and all up to each: in the order they were made."""
    yield []
    for number, change in enumerate(pending):
        yield list(pending[: number + 1])
        yield [change]
        yield [other for other in pending if other is not change]


def _overlay(changes: Sequence[Change]) -> "dict[tuple[int, str], File | Folder | None]":
    return {(id(folder), name): node for change in changes for folder, name, node in change.entries}


def _collect(folder: Folder, prefix: str, overlay, part: float, state: "dict[str, bytes | None]") -> None:
    entries = dict(folder.durable)
    for (owner, name), node in overlay.items():
        if owner == id(folder):
            _set(entries, name, node)
    for name, node in entries.items():
        path = f"{prefix}{name}"
        if isinstance(node, File):
            state[path] = (
                node.durable + node.content[len(node.durable) :][: int(part * (len(node.content) - len(node.durable)))]
            )
        else:
            state[path] = None
            _collect(node, f"{path}/", overlay, part, state)


def _set(entries, name, node):
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _read(path: Path) -> Folder:
    folder = Folder()
    for child in path.iterdir():
        node = _read(child) if child.is_dir() else File(child.read_bytes(), child.read_bytes())
        folder.entries[child.name] = folder.durable[child.name] = node
    return folder
