"""Writing a run's checkpoints, at once or in the background, and removing those that are no longer kept."""

from collections.abc import Callable

import nxd_ckpt
from nxd_state import barrier, get_world_group

from nxd_trainer.training.checkpoints import check_weights, describe_run, tensors_to_save
from nxd_trainer.training.run_state import RunState


class RunSaver:
    """Saves a run as its recipe's `checkpoint` section says; at most one checkpoint is being written at a time.

    Args:
        state: the run.
        say: called with a line about each checkpoint.
    """

    def __init__(self, state: RunState, say: Callable[[str], None]) -> None:
        self._state = state
        self._say = say
        self._pending: nxd_ckpt.AsyncSave | None = None

    def save(self, held_out_loss: float | None) -> None:
        """Write a checkpoint under the tag of the run's step, or begin to, once the one before is complete.

        By all ranks.

        Args:
            held_out_loss: of the weights as they are now, if it is known.

        Raises:
            TrainingDiverged: there is nothing worth saving.
            CheckpointError: it cannot be written, or the one before was not.
        """
        self.finish()
        check_weights(self._state)
        metrics = {} if held_out_loss is None else {"held_out_loss": held_out_loss}
        save = nxd_ckpt.async_save if self._state.recipe.checkpoint.background else nxd_ckpt.save
        tag = f"step-{self._state.step:08d}"
        self._pending = save(
            self._state.recipe.checkpoint_folder,
            tag,
            tensors_to_save(self._state),
            step=self._state.step,
            objects=describe_run(self._state) | {"metrics": metrics},
            overwrite=True,
        )
        if self._pending is None:
            self._committed(tag)

    def poll(self) -> None:
        """Say that a background save is complete, if so. Raises nothing: ranks may notice it at different steps."""
        if self._pending is not None and self._pending.committed:
            self._committed(self._pending.tag)

    def finish(self) -> None:
        """Wait until what is being written is complete. By all ranks.

        Raises:
            CheckpointError: it has failed; on every rank.
        """
        if self._pending is not None:
            self._pending.wait()
            self._committed(self._pending.tag)

    def close(self) -> None:
        """As `finish`, and free what background saves hold; afterwards the folder is as it will stay. By all ranks."""
        try:
            self.finish()
        finally:
            nxd_ckpt.end_async_saves()
        barrier(get_world_group())

    def _committed(self, tag: str) -> None:
        self._pending = None
        options, folder = self._state.recipe.checkpoint, self._state.recipe.checkpoint_folder
        if self._state.is_writer and options.keep:
            nxd_ckpt.retain(
                folder,
                keep_last=options.keep,
                keep_every=options.keep_every or None,
                keep_best=options.keep_best,
                metric="held_out_loss" if options.keep_best else None,
            )
        self._say(f"saved {folder / tag}")
