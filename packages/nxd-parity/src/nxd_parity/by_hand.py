"""What a program records itself, where it knows more of its tensors than hooks can see."""

from torch import Tensor

from nxd_parity.events import KINDS, Placement
from nxd_parity.hooks import StepHooks


class Recorder:
    """A recording that is under way; `record` makes it."""

    def __init__(self, hooks: StepHooks) -> None:
        """Record where these hooks do."""
        self._hooks = hooks

    def tensor(self, kind: str, name: str, value: Tensor, *, placement: Placement | None = None, part: int = 0) -> None:
        """Record a tensor. Parameters and optimizer states are those after the last step that has ended.

        Args:
            kind: one of `nxd_parity.events.KINDS`.
            name: the name that it has in the reference; of an optimizer state `parameter/exp_avg`; "" of a loss.
            value: this rank's values.
            placement: the box of the whole tensor that they are; by default that of a DTensor, or it is inferred.
            part: counts the boxes of one tensor that this rank has, from 0.

        Raises:
            ValueError: there is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is none of {', '.join(map(repr, KINDS))}")
        self._hooks.tensor(kind, name, value, part, placement)

    def end_step(self) -> None:
        """Say that a step has ended, after the optimizer's; for `record(by_hand=True)`."""
        self._hooks.step_is_done()
