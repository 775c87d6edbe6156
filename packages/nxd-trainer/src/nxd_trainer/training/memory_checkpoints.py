"""A run's checkpoints in host memory: written often, read when ranks are lost, and gone when the job ends.

They hold the same data as those on disk, so any layout resumes from them. One is kept besides the one being written.
"""

from collections.abc import Callable

import nxd_ckpt
from nxd_ckpt import CheckpointError, CheckpointInfo
from nxd_ckpt.errors import RanksLostError
from nxd_elastic.peers.store import job_url
from nxd_engine.checkpoints.save import finalize_checkpoint, write_checkpoint
from nxd_engine.logs import get_logger
from nxd_state import all_gather_object, get_world_group

from nxd_trainer.recipe import Recipe
from nxd_trainer.training.checkpoints import check_weights, newest_on_disk, resume_from, run_contents, run_tag
from nxd_trainer.training.run_state import RunState

_logger = get_logger("nxd_trainer")


class MemorySaver:
    """Writes memory checkpoints in the background, as the recipe's `checkpoint.memory_every` says.

    Args:
        state: the run.
        warn: logs a line about a checkpoint that could not be written; the run continues.

    Raises:
        ValueError: the recipe asks for them, but no host keeps files in memory.
    """

    def __init__(self, state: RunState, warn: Callable[[str], None]) -> None:
        self._state = state
        self._warn = warn
        self._url = _url(state.recipe)
        self._is_writing = False

    def save(self) -> None:
        """Start writing a checkpoint of the current state. Call it on all ranks, when nothing is being written.

        Raises:
            TrainingDiverged: a weight is not finite; the last checkpoint is kept.
        """
        url = self._url
        assert url is not None
        check_weights(self._state)
        write_checkpoint(
            url,
            run_tag(self._state),
            run_contents(self._state, stands_alone=False),  # only this run reads it
            finish=lambda: _keep_newest(url),
            in_background=True,
        )
        self._is_writing = True

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Call it on all ranks.

        Raises:
            RanksLostError: a rank is lost.
        """
        if not self._is_writing:
            return
        self._is_writing = False
        try:
            finalize_checkpoint()
        except RanksLostError:
            raise
        except CheckpointError as error:  # such as full memory; the same on all ranks
            self._warn(f"no checkpoint in the memory of hosts: {error}")


def resume_from_memory(state: RunState) -> str | None:
    """Resume from the newest checkpoint in host memory, unless the one on disk is newer. Call it on all ranks.

    Checkpoints that cannot be read, because more hosts are lost than have copies, are skipped.

    Returns:
        A label of the checkpoint; None if there is none to resume from.

    Raises:
        CheckpointError: a damaged checkpoint may have partly filled the run, and there is no other one.
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
        except CheckpointError as error:  # on all ranks; the next load overwrites the tensors that it filled
            _logger.warning(f"skipping {info.tag} in the memory of the hosts: {error}")
            damage = error if _has_all_files(url, info.tag) else damage
            continue
        return f"{info.tag} in the memory of the hosts"
    if damage is not None and on_disk is None:  # the run would otherwise start from partly filled weights
        raise CheckpointError(f"the only checkpoint to resume from is damaged, in memory: {damage}") from damage
    return None


def _has_all_files(url: str, tag: str) -> bool:
    """Whether the first rank sees all files; if so, loading has started to fill tensors."""

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
            f"checkpoint.memory_every={options.memory_every}, but no host of this run keeps checkpoints in memory: "
            "add --elastic, which enables that, or leave it out"
        )
    return url


def _by_first_rank(url: str) -> list[CheckpointInfo]:
    """List the checkpoints that the first rank sees, newest first: other hosts may reach different ones."""
    found: list[CheckpointInfo] = []
    if get_world_group().rank == 0:
        try:
            found = nxd_ckpt.list_checkpoints(url)
        except (CheckpointError, OSError) as error:  # fall back to the disk
            _logger.warning(f"skipping the memory of the hosts: {error}")
    of_first: list[CheckpointInfo] = all_gather_object(found, get_world_group())[0]
    return of_first[::-1]


def _keep_newest(url: str) -> None:
    nxd_ckpt.retain(url, keep_last=1)
