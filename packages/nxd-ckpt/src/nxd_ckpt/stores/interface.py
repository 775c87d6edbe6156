"""The storage interface for saving and loading.

A checkpoint is a tag, a manifest and files named relative to the tag, such as `data/<name>` and `extra/<name>`. A store
does not know their contents. Names come from a validated manifest or from this package, so stores need not check them
again, but they must not follow links put in place of files.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a kind of storage.

    Attributes:
        other_processes: whether other processes on this machine share the storage.
        other_files: whether other programs can read and write there, including files that are not checkpoints.
        remote: whether a read is a request with latency, so that reads are batched and issued ahead.
    """

    other_processes: bool
    other_files: bool
    remote: bool


@dataclass(frozen=True, slots=True)
class ReadRange:
    """A range of a file, `destination.nbytes` bytes starting at byte `offset`, and the writable memory to fill."""

    offset: int
    destination: memoryview


@dataclass(frozen=True, slots=True)
class Garbage:
    """A file or folder that belongs to no checkpoint, and its size."""

    path: str
    num_bytes: int


class SaveTransaction(Protocol):
    """One save in progress. Every rank has one with the same tag and save id; the rank that commits is the leader.

    Order of calls: `begin` and optionally `hold` (leader), then `write_file` on any rank and from any process, then
    `file_size` and `commit` (leader), and always `end` on every rank. It can be pickled before `begin`, to write from
    another process.
    """

    def begin(self) -> None:
        """Prepare for writing files and clear the remains of failed saves.

        Raises:
            CheckpointError: the tag is taken, or another save is in progress.
        """

    def hold(self, files: Collection[str]) -> None:
        """Protect data files of other checkpoints from removal until `end`; see `manifests.py`.

        Raises:
            OSError: the hold cannot be recorded.
        """

    def write_file(self, file: str, parts: "Iterable[bytes | memoryview]", num_bytes: int) -> None:
        """Write a new file; it is durable when this returns. Each part may be overwritten once the next is asked for.

        Args:
            file: its name.
            parts: its content.
            num_bytes: total size of all parts, for storage that allocates space first.

        Raises:
            OSError: it cannot be written.
            CheckpointError: this process cannot see the location created by `begin`.
        """

    def file_size(self, file: str) -> int:
        """Return the size in bytes of a file written by any rank.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def commit(self, manifest: bytes) -> None:
        """Turn the files into a checkpoint under the tag, atomically, even in a crash.

        Raises:
            CheckpointError: the tag is taken.
        """

    def end(self) -> None:
        """Remove uncommitted files, on the leader; does nothing on other ranks."""


class Store(Protocol):
    """A folder of checkpoints. Methods raise OSError when the storage fails."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the storage."""

    @property
    def location(self) -> str:
        """The folder, as shown in messages and accepted by `open_store`."""

    def where(self, tag: str, file: str = "manifest.json") -> str:
        """Return the full path or URL of a file, for messages."""

    def tags(self) -> list[str]:
        """Return the names of everything that has a manifest, in no meaningful order."""

    def beginnings(self, num_bytes: int) -> Iterator[tuple[str, bytes, int | None]]:
        """Yield each tag with the first bytes of its manifest (empty if unreadable) and its size if known."""

    def read_manifest(self, tag: str) -> bytes:
        """Return the manifest as it was committed.

        Raises:
            FileNotFoundError: there is no checkpoint with this tag.
            CheckpointError: it is larger than the limit for manifests.
        """

    def file_size(self, tag: str, file: str) -> int:
        """Return the size in bytes of a file.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def read_into(self, tag: str, file: str, ranges: Sequence[ReadRange]) -> None:
        """Fill the memory of all ranges, which must have ascending offsets and not overlap.

        Raises:
            CheckpointError: the file ends inside or before a range.
        """

    def delete(self, tag: str) -> None:
        """Delete a checkpoint atomically, manifest first; its space is free when this returns.

        Data files that other checkpoints reference stay; files that only this one referenced are removed. With a
        damaged manifest, files that it referenced in other checkpoints are left to `garbage`.

        Raises:
            FileNotFoundError: there is no checkpoint with this tag.
            CheckpointError: its manifest cannot be read or is of a newer version.
        """

    def begin_save(self, tag: str, save_id: str, *, overwrite: bool) -> SaveTransaction:
        """Return a transaction for one save; nothing changes before its `begin`."""

    def held(self) -> set[str]:
        """Return the data files held by saves in progress, and by failed saves until those are cleared."""

    def pinned(self) -> set[str]:
        """Return the pinned tags; a tag can be pinned without a checkpoint."""

    def set_pinned(self, tag: str, *, to: bool) -> None:
        """Pin (True) or unpin (False) a tag. A pin outlives the checkpoint of its tag."""

    def garbage(self, *, dead_after: float, delete: bool) -> list[Garbage]:
        """Return the remains of failed saves and deletions, and optionally remove them.

        Args:
            dead_after: seconds without a change after which a file counts as the remains of a failed save, if the
                storage cannot tell a failed save from one in progress.
            delete: whether to remove them.

        Raises:
            CheckpointError: a save is in progress, if the storage can tell.
        """
