"""Averaging a pipeline's gradients over the replicas: by which object, and when they may be sent."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol
from weakref import ref

from torch import Tensor


class GradientSync(Protocol):
    """An object that averages gradients over the replicas of a model, such as an optimizer of nxd_optim."""

    def last_backward(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """A block in which these parameters get their last gradient of a `run_train`, so that they may leave."""

    def synchronize(self) -> None:
        """Wait until all gradients are averaged."""


class GradientSyncs:
    """Those of one pipeline; none of them is kept alive."""

    def __init__(self) -> None:
        self._known: list[tuple[ref[GradientSync], set[int]]] = []  # with the ids of their parameters
        self._is_on = True

    def add(self, sync: GradientSync, parameters: Iterable[Tensor]) -> None:
        """From now on `sync` averages the gradients of these parameters, replacing an earlier one."""
        own = {id(parameter) for parameter in parameters}
        for known, theirs in self._known:
            if known() is sync:
                own |= theirs
        self._known = [
            (known, theirs) for known, theirs in self._known if known() not in (None, sync) and theirs.isdisjoint(own)
        ]
        self._known.append((ref(sync), own))

    @contextmanager
    def off(self) -> Iterator[None]:
        """A block in which nothing is averaged."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def active(self) -> list[GradientSync]:
        """Those that are to average the gradients of the next run."""
        return [sync for it, _ in self._known if (sync := it()) is not None] if self._is_on else []

    def are_missing(self) -> bool:
        """Whether the next run is to average gradients, and there is none to do it."""
        return self._is_on and not self.active()


def last_backward(syncs: Sequence[GradientSync], parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """A block for the only one; several would send in an order that depends on the graph, which ranks may not share."""
    return syncs[0].last_backward(parameters) if len(syncs) == 1 else nullcontext()
