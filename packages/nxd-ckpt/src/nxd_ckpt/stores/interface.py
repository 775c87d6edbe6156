"""The interface to storage that saving and loading need.

A checkpoint is a tag, a manifest and files named relative to the tag, such as `data/<name>` and `extra/<name>`. A store
knows nothing of what they contain. Names come from a validated manifest or from this package: stores need not check
them again, but must not follow links that were put in their place.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a kind of storage.

    Attributes:
        other_processes: what another process on this machine writes lands in the same place.
        other_files: other programs can read and write there, also files that belong to no checkpoint of this package.
        remote: a read is a request that is waited for, so several are made as one, and the next one ahead.
    """

    other_processes: bool
    other_files: bool
    remote: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """`destination.nbytes` bytes of a file from byte `offset` on, and the writable memory that they go to."""

    offset: int
    destination: memoryview


@dataclass(frozen=True, slots=True)
class Garbage:
    """A file or folder that belongs to no checkpoint, and its size."""

    path: str
    num_bytes: int


class SaveTransaction(Protocol):
    """One save on its way. Every rank has one of the same tag and save id; the one that commits is the leader.

    Order of calls: `begin` and perhaps `hold` (leader), then `write_file` on any rank and from any process, then
    `file_size` and `commit` (leader), and `end` on every rank in any case. It can be pickled before `begin`, to write
    from another process.
    """

    def begin(self) -> None:
        """Gets ready for files, clearing what dead saves have left.

        Raises:
            CheckpointError: the tag is taken, or another save is at work.
        """

    def hold(self, files: Collection[str]) -> None:
        """Keeps data files of other checkpoints from being removed, until `end`; see `in_use.py`.

        Raises:
            OSError: that cannot be noted.
        """

    def write_file(self, file: str, parts: "Iterable[bytes | memoryview]", num_bytes: int) -> None:
        """Writes a new file; it is durable when this returns. Each part may be overwritten once the next is asked for.

        Args:
            file: its name.
            parts: its content.
            num_bytes: of all parts together, for storage that makes room first.

        Raises:
            OSError: it cannot be written.
            CheckpointError: the place made by `begin` is not to be seen from here.
        """

    def file_size(self, file: str) -> int:
        """Bytes of a file written by any rank.

        Raises:
            FileNotFoundError: there is none.
        """

    def commit(self, manifest: bytes) -> None:
        """Makes the files a checkpoint under the tag. All or nothing, also in a crash.

        Raises:
            CheckpointError: the tag is taken.
        """

    def end(self) -> None:
        """Removes what was not committed, on the leader; does nothing elsewhere."""


class Store(Protocol):
    """A folder of checkpoints. Methods raise OSError when the storage fails."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the storage."""

    @property
    def location(self) -> str:
        """The folder, as messages call it and as `open_store` finds it again."""

    def where(self, tag: str, file: str = "manifest.json") -> str:
        """The full address of a file, for messages."""

    def tags(self) -> list[str]:
        """Names of what looks like a checkpoint (it has a manifest), in no meaningful order."""

    def beginnings(self, num_bytes: int) -> Iterator[tuple[str, bytes, int | None]]:
        """The first bytes of the manifest of each tag, and its size if that is known; none where it cannot be read."""

    def read_manifest(self, tag: str) -> bytes:
        """The manifest as it was committed.

        Raises:
            FileNotFoundError: there is no checkpoint of this tag.
            CheckpointError: it is larger than a manifest can be.
        """

    def file_size(self, tag: str, file: str) -> int:
        """Bytes of a file.

        Raises:
            FileNotFoundError: there is none.
        """

    def read_into(self, tag: str, file: str, pieces: Sequence[Piece]) -> None:
        """Fills the memory of all pieces, which are given by ascending offset and do not overlap.

        Raises:
            CheckpointError: the file ends before a piece does.
        """

    def delete(self, tag: str) -> None:
        """Takes a checkpoint away: as a whole at once, manifest first; its space is free when this returns.

        Its data files that others reference stay, and those that it alone referenced go.

        Raises:
            CheckpointError: its manifest is damaged.
        """

    def begin_save(self, tag: str, save_id: str, *, overwrite: bool) -> SaveTransaction:
        """A transaction for one save; nothing is changed before its `begin`."""

    def held(self) -> set[str]:
        """The data files that saves under way hold; also those of dead saves, until they are cleared."""

    def pinned(self) -> set[str]:
        """The tags that are pinned; a tag can be so without a checkpoint."""

    def set_pinned(self, tag: str, *, to: bool) -> None:
        """Pins a tag (True) or ends that (False). A pin outlives the checkpoint of its tag."""

    def garbage(self, *, dead_after: float, delete: bool) -> list[Garbage]:
        """The remains of saves and deletions that died; removes them if asked to.

        Args:
            dead_after: where a save under way cannot be told from a dead one, seconds since a file changed after which
                it belongs to a dead one.
            delete: free its space as well.

        Raises:
            CheckpointError: a save is at work, where that can be told.
        """
