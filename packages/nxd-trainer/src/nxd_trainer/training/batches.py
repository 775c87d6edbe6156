"""A run's batches on its device, made and sent there by a thread before the steps that use them."""

from collections.abc import Generator, Iterator, Sequence

import torch
from nxd_state import get_device, send_to_device

from nxd_trainer.data import Batch, HeldOutLoader, TrainLoader, read_ahead

STEPS_AHEAD = 2  # one is on its way to the device while the next is being made


class TrainBatches:
    """What one training step after the other trains on.

    The position of the loader, which checkpoints hold, is that of the batches taken, not of those read ahead.

    Args:
        loader: where they come from; its position must not be changed by others from the first step to `close`.
    """

    def __init__(self, loader: TrainLoader) -> None:
        self._loader = loader
        self._ahead: Generator[Batch, None, None] | None = None

    def next_step(self) -> Batch:
        """This rank's microbatches of the next step, one below the other, there or on their way to the device.

        Raises:
            Exception: what the loader raised for this step.
        """
        if self._ahead is None:
            steps = self._loader.steps_from(self._loader.samples_consumed)
            self._ahead = read_ahead((_sent(together(batches)) for batches in steps), STEPS_AHEAD)
        batch = next(self._ahead)
        self._loader.pass_step()
        return batch

    def close(self) -> None:
        """End the thread; a step that is asked for later begins another one."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def held_out_batches(loader: HeldOutLoader) -> Iterator[Batch]:
    """All batches of an evaluation, there or on their way to the device."""
    return read_ahead(map(_sent, loader), STEPS_AHEAD)


def together(batches: Sequence[Batch]) -> Batch:
    """Microbatches as one batch, which a model cuts into these again."""
    return Batch(*[torch.cat(tensors) for tensors in zip(*batches, strict=True)])


def _sent(batch: Batch) -> Batch:
    # A list: a tuple half made from a generator must not be held by others, as by who looks through all objects.
    return Batch(*[send_to_device(tensor, get_device()) for tensor in batch])
