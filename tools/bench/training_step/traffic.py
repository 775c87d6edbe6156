"""What one step of ours sends between ranks, and how long it waits for that."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from nxd_state import Pending
from nxd_state.collectives.c10d import C10dTransport
from nxd_state.collectives.transport import Result
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
            method = getattr(C10dTransport, name)
            kind = name.rstrip("_").replace("_", "-")
            stack.enter_context(mock.patch.object(C10dTransport, name, _measured(method, traffic[kind])))
        trainee.step()
    return {kind: of_kind for kind, of_kind in traffic.items() if of_kind.number}


def _measured(method: Callable[..., Result], traffic: Traffic) -> Callable[..., Result]:
    def call(transport: C10dTransport, tensor: Tensor, *args: Any, **kwargs: Any) -> Result:
        traffic.number += 1
        traffic.bytes += tensor.nbytes
        with _stopwatch(traffic):
            result = method(transport, tensor, *args, **kwargs)
        return _MeasuredPending(result, traffic) if isinstance(result, Pending) else result

    return call


class _MeasuredPending(Pending[Tensor]):
    def __init__(self, pending: Pending[Tensor], traffic: Traffic) -> None:
        self._pending, self._traffic = pending, traffic

    def wait(self) -> Tensor:
        with _stopwatch(self._traffic):
            return self._pending.wait()


@contextmanager
def _stopwatch(traffic: Traffic) -> Iterator[None]:
    start = time.perf_counter()
    yield
    traffic.seconds_waited += time.perf_counter() - start
