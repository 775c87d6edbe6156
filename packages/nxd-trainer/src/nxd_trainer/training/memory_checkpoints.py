"""A run's checkpoints in the memory of its hosts: written often, read when ranks are lost, and gone with the job.

They hold what those on disk hold, so any layout resumes from them. One of them is kept, beside that being written.
"""

from collections.abc import Callable

import nxd_ckpt
from nxd_ckpt import CheckpointError, CheckpointInfo
from nxd_ckpt.errors import RanksLostError
from nxd_elastic.peers.store import job_url
from nxd_engine.checkpoints.saving import finalize_checkpoint, write_checkpoint
from nxd_engine.logs import get_logger
from nxd_state import all_gather_object, get_world_group

from nxd_trainer.recipe import Recipe
from nxd_trainer.training.checkpoints import check_weights, newest_on_disk, resume_from, run_contents, run_tag
from nxd_trainer.training.run_state import RunState

_logger = get_logger("nxd_trainer")


class MemorySaver:
    """Writes them in the background, as the recipe's `checkpoint.memory_every` says.

    Args:
        state: the run.
        warn: called with a line about a checkpoint that could not be written, which ends nothing.

    Raises:
        ValueError: the recipe asks for them, and no host keeps files in memory.
    """

    def __init__(self, state: RunState, warn: Callable[[str], None]) -> None:
        self._state = state
        self._warn = warn
        self._url = _url(state.recipe)
        self._is_writing = False

    def save(self) -> None:
        """Begin to write one of the run as it is. By all ranks, when nothing is being written.

        Raises:
            TrainingDiverged: a weight is not finite; what is kept stays.
        """
        url = self._url
        assert url is not None
        check_weights(self._state)
        write_checkpoint(
            url,
            run_tag(self._state),
            run_contents(self._state, stands_alone=False),  # nobody else reads it
            finish=lambda: _keep_newest(url),
            in_background=True,
        )
        self._is_writing = True

    def finish(self) -> None:
        """Wait for the one that is being written. By all ranks.

        Raises:
            RanksLostError: a rank is gone.
        """
        if not self._is_writing:
            return
        self._is_writing = False
        try:
            finalize_checkpoint()
        except RanksLostError:
            raise
        except CheckpointError as error:  # such as memory that is full; the same on all ranks
            self._warn(f"no checkpoint in the memory of hosts: {error}")


def resume_from_memory(state: RunState) -> str | None:
    """Resume from the newest checkpoint in the memory of the hosts, if that on disk is not newer. By all ranks.

    One that cannot be read, because more hosts are lost than have copies, is passed over.

    Returns:
        Where it was, for people; None if there is none to resume from.

    Raises:
        CheckpointError: one was damaged, so that the run may have been filled with a part of it, and there is no other.
    """
    url = _url(state.recipe)
    if url is None or state.recipe.checkpoint.resume == "never":
        return None
    on_disk = newest_on_disk(state.recipe)
    newest = -1 if on_disk is None else on_disk.step or 0
    damage: CheckpointError | None = None
    for info in _by_first_rank(url):
        if info.step is None or info.step < newest:
            continue
        try:
            resume_from(state, url, info.tag)
        except RanksLostError:
            raise
        except CheckpointError as error:  # on all ranks; what it has filled is filled again by whatever comes next
            _logger.warning(f"passing over {info.tag} in the memory of the hosts: {error}")
            damage = error if _has_all_files(url, info.tag) else damage
            continue
        return f"{info.tag} in the memory of the hosts"
    if damage is not None and on_disk is None:  # then the run would begin with weights that are partly filled
        raise CheckpointError(f"no checkpoint to resume from but a damaged one in memory: {damage}") from damage
    return None


def _has_all_files(url: str, tag: str) -> bool:
    """Whether reading has begun, as it does where all files are there; as the first rank sees it."""

    def look() -> bool:
        try:
            nxd_ckpt.open_checkpoint(url, tag).check_files()
        except (CheckpointError, OSError):
            return False
        return True

    group = get_world_group()
    of_first: bool = all_gather_object(look() if group.rank == 0 else None, group)[0]
    return of_first


def _url(recipe: Recipe) -> str | None:
    options = recipe.checkpoint
    if not options.memory_every:
        return None
    url = job_url(options.memory_copies)
    if url is None:
        raise ValueError(
            f"checkpoint.memory_every={options.memory_every}, and no host of this run keeps checkpoints in memory: add "
            "--elastic, which starts that, or leave it out"
        )
    return url


def _by_first_rank(url: str) -> list[CheckpointInfo]:
    """Newest first, as the first rank sees them: other hosts may reach others."""
    found: list[CheckpointInfo] = []
    if get_world_group().rank == 0:
        try:
            found = nxd_ckpt.list_checkpoints(url)
        except (CheckpointError, OSError) as error:  # then there is the disk
            _logger.warning(f"passing over the memory of the hosts: {error}")
    of_first: list[CheckpointInfo] = all_gather_object(found, get_world_group())[0]
    return of_first[::-1]


def _keep_newest(url: str) -> None:
    nxd_ckpt.retain(url, keep_last=1)
