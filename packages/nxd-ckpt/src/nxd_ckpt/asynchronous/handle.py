"""The handle that `async_save` returns: the progress of a save, and its outcome."""

import threading

from nxd_ckpt.errors import CheckpointError


class AsyncSave:
    """One save in the background.

    Attributes:
        tag: of the checkpoint.
        save_id: unique to this save, the same on all ranks.
        failure: why it failed, once it has.
        told: whether that has been raised to the caller.
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
        """Whether the caller may change the tensors again: true when `async_save` has returned, unless it was told to
        copy in the background.
        """
        return self._staged.is_set()

    def wait_until_staged(self) -> None:
        """Returns when the caller may change the tensors again, also if the save has failed."""
        self._staged.wait()

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is complete and on the disk."""
        return self._done.is_set() and self.failure is None

    def done(self) -> bool:
        """Whether it is over, committed or failed."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the checkpoint is complete and on the disk.

        Args:
            timeout: seconds; None means as long as it takes, which the save's own `timeout` bounds.

        Raises:
            TimeoutError: it is still under way.
            CheckpointError: it failed, on all ranks with the same text. Not raised again by the next save then.
            RanksLostError: it failed as other ranks did not answer.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"saving checkpoint {self.tag!r} takes longer than {timeout:g} seconds; it goes on")
        if self.failure is not None:
            self.told = True
            raise self._error_type(self.failure)

    def wait_until_done(self) -> None:
        """Returns when it is over, whether it is committed or has failed."""
        self._done.wait()

    def set_staged(self) -> None:
        """The caller's tensors are not needed any more."""
        self._staged.set()

    def set_done(self, failure: str | None, error_type: type[CheckpointError] = CheckpointError) -> None:
        """It is over: committed, or failed for this reason, which `wait` raises as this type."""
        self.failure, self._error_type = failure, error_type
        self._staged.set()
        self._done.set()

    def __repr__(self) -> str:
        how = "under way" if not self.done() else "committed" if self.failure is None else "failed"
        return f"AsyncSave({self.tag!r}, {how})"
