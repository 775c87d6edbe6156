"""`GradientScale`: divides the gradients of each backward pass by how many are added up for one step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor


class GradientScale:
    """Scales what a backward pass adds to the gradients, wherever in the pass the loss is made.

    A pipeline makes it on its last stage, and adds to the gradients itself, so that no rank has a loss to divide.

    Args:
        parameters: those trained; gradients are scaled on their way to them, before anyone accumulates them.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._divisor = 1
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(self._scaled)

    @contextmanager
    def divided_by(self, divisor: int) -> Iterator[None]:
        """Divide the gradients of backward passes inside the block."""
        self._divisor = divisor
        try:
            yield
        finally:
            self._divisor = 1

    def _scaled(self, gradient: Tensor) -> Tensor:
        return gradient if self._divisor == 1 else gradient / self._divisor
