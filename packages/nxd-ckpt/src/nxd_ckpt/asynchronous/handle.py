"""The handle that `async_save` returns, and the handles of this process whose saves are not settled.

A save is settled when it is committed, or when its failure has been reported. Handles are listed by rank, as several
ranks may be threads of one process.
"""

import os
import sys
import threading
from collections import defaultdict
from typing import NamedTuple

from nxd_ckpt.errors import CheckpointError


class AsyncSave:
    """One background save.

    Attributes:
        tag: the checkpoint's name.
        save_id: unique to this save, the same on all ranks.
        failure: the reason, if it failed.
        reported: whether the failure was raised to the caller.
        needs_caller: whether the thread that called `async_save` still has to copy tensors.
    """

    def __init__(self, tag: str, save_id: str) -> None:
        self.tag = tag
        self.save_id = save_id
        self.needs_caller = True
        self.reported = False
        self.failure: str | None = None
        self._error_type: type[CheckpointError] = CheckpointError
        self._staged = threading.Event()
        self._done = threading.Event()

    @property
    def staged(self) -> bool:
        """Whether the caller may change the tensors again: true when `async_save` returns, unless
        `copy_in_background=True`.
        """
        return self._staged.is_set()

    def wait_until_staged(self) -> None:
        """Wait until the caller may change the tensors again, or the save has failed."""
        self._staged.wait()

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is complete and on disk."""
        return self._done.is_set() and self.failure is None

    def done(self) -> bool:
        """Whether the save has finished, committed or failed."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete and on disk.

        Args:
            timeout: seconds; None means no limit except the save's own `timeout`.

        Raises:
            TimeoutError: the save is still in progress.
            CheckpointError: the save failed; the text is the same on all ranks. The next save does not raise it again.
            RanksLostError: the save failed because other ranks did not answer.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"saving checkpoint {self.tag!r} takes longer than {timeout:g} seconds; it continues")
        if self.failure is not None:
            self.reported = True
            raise self._error_type(self.failure)

    def wait_until_done(self) -> None:
        """Wait until the save has finished, committed or failed."""
        self._done.wait()

    def set_staged(self) -> None:
        """Mark the caller's tensors as no longer needed."""
        self._staged.set()

    def set_done(self, failure: str | None, error_type: type[CheckpointError] = CheckpointError) -> None:
        """Mark the save as committed, or as failed with a reason that `wait` raises as the given type."""
        self.failure, self._error_type = failure, error_type
        self._staged.set()
        self._done.set()

    def __repr__(self) -> str:
        how = "under way" if not self.done() else "committed" if self.failure is None else "failed"
        return f"AsyncSave({self.tag!r}, {how})"


class RankKey(NamedTuple):
    """A rank of this process, by its number and the size of its world."""

    rank: int
    world_size: int


_handles: dict[RankKey, list[AsyncSave]] = defaultdict(list)


def register(key: RankKey, save: AsyncSave) -> None:
    """Add the handle of a save that begins."""
    _handles[key] = [*_unsettled(key), save]


def saves_in_progress() -> list[AsyncSave]:
    """Return this process's saves that are in progress."""
    return [save for key in list(_handles) for save in _unsettled(key) if not save.done()]


def wait_for_saves() -> None:
    """Wait until no save of this process is in progress, whatever its group; do not raise their errors."""
    for save in saves_in_progress():
        save.wait_until_done()


def unreported_failures(key: RankKey) -> dict[str, str]:
    """Return the errors of this rank's saves that have not been reported, by save id."""
    return {
        save.save_id: f"saving checkpoint {save.tag!r} in the background has failed: {save.failure}"
        for save in _unsettled(key)
        if save.failure is not None and not save.reported
    }


def mark_reported(key: RankKey, save_ids: set[str]) -> None:
    """Mark the errors of these saves as raised, even if a save has not failed on this rank yet."""
    for save in _unsettled(key):
        if save.save_id in save_ids:
            save.reported = True


def report_at_exit() -> None:
    """Print the errors that were not reported before the program ends."""
    for key in list(_handles):
        for text in unreported_failures(key).values():
            print(f"nxd_ckpt: {text}", file=sys.stderr)


def _unsettled(key: RankKey) -> list[AsyncSave]:
    return [save for save in _handles.get(key, []) if not (save.done() and (save.reported or save.committed))]


# A forked child neither waits for its parent's saves nor reports them.
os.register_at_fork(after_in_child=_handles.clear)
