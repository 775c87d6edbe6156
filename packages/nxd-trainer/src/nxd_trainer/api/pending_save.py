"""The save in the background: at most one at a time, and what is to be done once it is committed."""

import atexit
from dataclasses import dataclass

import nxd_ckpt
from nxd_ckpt import AsyncSave
from nxd_ckpt.coordinator import coordinator_for, on_rank_zero

from nxd_trainer.api.checkpoint_tags import KEEP_ALL


@dataclass(frozen=True)
class _PendingSave:
    handle: AsyncSave
    root: str
    num_kept: int
    is_first_rank: bool

    def keep_newest(self) -> None:
        """Remove what is not to be kept any more; does nothing on all ranks but the first."""
        if self.is_first_rank:
            keep_newest(self.root, self.num_kept)


_pending: list[_PendingSave] = []


def note_save(handle: AsyncSave, root: str, num_kept: int) -> None:
    """A save in the background has begun; `finalize_checkpoint` sees it through."""
    _pending.append(_PendingSave(handle, root, num_kept, is_first_rank=coordinator_for(None).rank == 0))


def finalize_checkpoint() -> None:
    """Wait for the save in the background, then drop the checkpoints that it is not to keep. Called by all ranks.

    Each save and load calls it first; without a save it does nothing. A program that ends finishes its save, too.

    Raises:
        CheckpointError: the save failed; on all ranks.
    """
    while _pending:
        save = _pending.pop()
        save.handle.wait()
        on_rank_zero(coordinator_for(None), "dropping old checkpoints", save.keep_newest)


def keep_newest(root: str, num_kept: int) -> None:
    """Remove all but the newest checkpoints; called by one rank, after a commit. Pinned ones and other folders stay."""
    if num_kept != KEEP_ALL:
        nxd_ckpt.retain(root, keep_last=num_kept)


def _finish_at_exit() -> None:
    """As `finalize_checkpoint`, but without asking other ranks, whose processes may be gone."""
    while _pending:
        save = _pending.pop()
        save.handle.wait()
        save.keep_newest()


# Runs before nxd_ckpt's own, which was registered earlier.
atexit.register(_finish_at_exit)
