"""Copies that are made while the caller goes on. Until they are, the tensors must not change: optimizers wait for it.

An optimizer's step is where a training changes what it saves, so the copy has the time of a forward and a backward.
"""

from collections.abc import Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from nxd_ckpt.asynchronous import pending
from nxd_ckpt.asynchronous.handover import Handover, Slice
from nxd_ckpt.errors import CheckpointError

_SMALL_BYTES = 2**20  # copied at once: counters and statistics, which a forward may change


class LateCopies:
    """The tensors of one save on their way into the arena.

    When it is made it copies those that are small or not in CPU memory; `finish` copies the others.

    Args:
        names: of the tensors, for messages.
        tensors: what is saved, in the order of the data file.
        memory: the arena, `uint8[at least as many bytes as the tensors have]`.
        handover: where to, when all is there; with one slot.

    Raises:
        Stopped: nothing is going to be written.
    """

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], memory: torch.Tensor, handover: Handover
    ) -> None:
        handover.wait_for_slot()
        self._handover = handover
        self._late: list[tuple[str, torch.Tensor, torch.Tensor, int]] = []  # with the place and the version
        self._num_bytes = 0
        for name, tensor in zip(names, tensors, strict=True):
            place = memory[self._num_bytes : self._num_bytes + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._num_bytes += tensor.nbytes
            if tensor.nbytes <= _SMALL_BYTES or not tensor.is_cpu or tensor.is_inference():
                place.copy_(tensor.detach())
            else:
                self._late.append((name, tensor.detach(), place, tensor._version))

    def finish(self) -> None:
        """Copies what is left, and hands all over.

        Raises:
            CheckpointError: a tensor has changed meanwhile.
        """
        for name, tensor, place, version in self._late:
            place.copy_(tensor)
            if tensor._version != version:
                raise CheckpointError(
                    f"{name!r} has changed before it was copied; call wait_until_staged() on the result of async_save "
                    "before you change tensors, or save with copy_in_background=False"
                )
        self._handover.put(Slice(0, self._num_bytes))
        self._handover.complete()


_hooks: list[RemovableHandle] = []  # one at most


def hold_optimizers() -> None:
    """From now on each step of any of torch's optimizers begins when all saves are staged."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(lambda *_: _wait_until_staged()))


def release_optimizers() -> None:
    """Ends that."""
    while _hooks:
        _hooks.pop().remove()


def _wait_until_staged() -> None:
    for save in pending.in_flight():
        save.wait_until_staged()
