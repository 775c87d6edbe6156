"""What one step of ours sends between ranks, and how long it waits for that."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from nxd_state import Pending
from nxd_state.collectives import c10d
from processes.over_gloo import over_gloo
from torch import Tensor

from training_step.step import Trainee


@dataclass
class Traffic:
    """Of one kind of collective in one step, on one rank."""

    number: int = 0
    bytes: int = 0
    seconds_waited: float = 0.0


def measure_traffic(trainee: Trainee) -> dict[str, Traffic]:
    """What one step of ours sends over gloo, by kind."""
    traffic: dict[str, Traffic] = defaultdict(Traffic)
    with ExitStack() as stack:
        stack.enter_context(over_gloo())
        for name in ("all_reduce_", "all_gather", "reduce_scatter"):
            function = getattr(c10d, name)
            kind = name.rstrip("_").replace("_", "-")
            stack.enter_context(mock.patch.object(c10d, name, _measured(function, traffic[kind])))
        trainee.step()
    return {kind: of_kind for kind, of_kind in traffic.items() if of_kind.number}


def _measured(function: Callable[..., Pending], traffic: Traffic) -> Callable[..., Pending]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Pending:
        traffic.number += 1
        traffic.bytes += tensor.nbytes
        with _stopwatch(traffic):
            pending = function(tensor, *args, **kwargs)
        return _MeasuredPending(pending, traffic)

    return call


class _MeasuredPending(Pending):
    def __init__(self, pending: Pending, traffic: Traffic) -> None:
        self._pending, self._traffic = pending, traffic

    def wait(self) -> Tensor:
        with _stopwatch(self._traffic):
            return self._pending.wait()


@contextmanager
def _stopwatch(traffic: Traffic) -> Iterator[None]:
    start = time.perf_counter()
    yield
    traffic.seconds_waited += time.perf_counter() - start
