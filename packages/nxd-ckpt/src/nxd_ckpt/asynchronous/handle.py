"""The handle that `async_save` returns: the progress of a save, and its outcome."""

import threading

from nxd_ckpt.errors import CheckpointError


class AsyncSave:
    """One background save.

    Attributes:
        tag: the checkpoint's name.
        save_id: unique to this save, the same on all ranks.
        failure: the reason, if it failed.
        told: whether the failure was raised to the caller.
        needs_its_caller: whether the thread that called `async_save` still has tensors to copy for it.
    """

    def __init__(self, tag: str, save_id: str) -> None:
        self.tag = tag
        self.save_id = save_id
        self.needs_its_caller = True
        self.told = False
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
        """Waits until the caller may change the tensors again, or the save has failed."""
        self._staged.wait()

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is complete and on disk."""
        return self._done.is_set() and self.failure is None

    def done(self) -> bool:
        """Whether the save has finished, committed or failed."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the checkpoint is complete and on disk.

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
            self.told = True
            raise self._error_type(self.failure)

    def wait_until_done(self) -> None:
        """Waits until the save has finished, committed or failed."""
        self._done.wait()

    def set_staged(self) -> None:
        """Marks the caller's tensors as no longer needed."""
        self._staged.set()

    def set_done(self, failure: str | None, error_type: type[CheckpointError] = CheckpointError) -> None:
        """Marks the save as committed, or as failed with a reason that `wait` raises as the given type."""
        self.failure, self._error_type = failure, error_type
        self._staged.set()
        self._done.set()

    def __repr__(self) -> str:
        how = "under way" if not self.done() else "committed" if self.failure is None else "failed"
        return f"AsyncSave({self.tag!r}, {how})"
