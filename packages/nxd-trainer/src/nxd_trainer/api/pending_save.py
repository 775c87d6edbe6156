"""The save in the background: at most one at a time, and what is to be done once it is committed."""

import atexit
from collections.abc import Callable
from dataclasses import dataclass

import nxd_ckpt
from nxd_ckpt import AsyncSave
from nxd_ckpt.coordinator import coordinator_for, on_rank_zero

from nxd_trainer.api.checkpoint_tags import KEEP_ALL

FINISHING = "finishing a checkpoint, and dropping old ones"


@dataclass(frozen=True)
class _PendingSave:
    handle: AsyncSave
    finish: Callable[[], None]
    is_first_rank: bool

    def finish_on_first_rank(self) -> None:
        """What is left to do after the commit; nothing on all ranks but the first."""
        if self.is_first_rank:
            self.finish()


_pending: list[_PendingSave] = []


def note_save(handle: AsyncSave, finish: Callable[[], None]) -> None:
    """A save in the background has begun; `finalize_checkpoint` sees it through, and has rank 0 `finish` it."""
    _pending.append(_PendingSave(handle, finish, is_first_rank=coordinator_for(None).rank == 0))


def finalize_checkpoint() -> None:
    """Wait for the save in the background, then drop the checkpoints that it is not to keep. Called by all ranks.

    Each save and load calls it first; without a save it does nothing. A program that ends finishes its save, too.

    Raises:
        CheckpointError: the save failed; on all ranks.
    """
    while _pending:
        save = _pending.pop()
        save.handle.wait()
        on_rank_zero(coordinator_for(None), FINISHING, save.finish_on_first_rank)


def keep_newest(root: str, num_kept: int) -> None:
    """Remove all but the newest checkpoints; called by one rank, after a commit. Pinned ones and other folders stay."""
    if num_kept != KEEP_ALL:
        nxd_ckpt.retain(root, keep_last=num_kept)


def _finish_at_exit() -> None:
    """As `finalize_checkpoint`, but without asking other ranks, whose processes may be gone."""
    while _pending:
        save = _pending.pop()
        save.handle.wait()
        save.finish_on_first_rank()


# Runs before nxd_ckpt's own, which was registered earlier.
atexit.register(_finish_at_exit)
