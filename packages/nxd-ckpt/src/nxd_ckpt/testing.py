"""Several ranks in one process, to try or test a layout without a launcher.

Each rank is a thread; they exchange messages through a barrier, encoded as they would be between processes.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from nxd_ckpt.coordinator import Coordinator
from nxd_ckpt.errors import RanksLostError
from nxd_ckpt.messages import decode_message, encode_message

Result = TypeVar("Result")


class Killed(BaseException):
    """Raised by a rank, it ends that rank as a kill would: nothing catches it, and the others lose contact."""


class _Meeting:
    def __init__(self, world_size: int, timeout: float) -> None:
        self.values: list[bytes] = [b""] * world_size
        self.barrier = threading.Barrier(world_size, timeout=timeout)


class _ThreadCoordinator:
    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world_size = world_size
        self._meeting = meeting

    def all_gather_object(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = encode_message(value)
        try:
            self._meeting.barrier.wait()
            values = list(self._meeting.values)
            self._meeting.barrier.wait()  # no rank may overwrite a value that another has not seen
        except threading.BrokenBarrierError:
            raise RanksLostError(f"rank {self.rank} of {self.world_size} lost contact with the other ranks") from None
        return [decode_message(data) for data in values]


def outcomes_on_threads(
    function: Callable[[Coordinator], Result], world_size: int, *, timeout: float = 60.0
) -> list[Result | BaseException]:
    """Calls `function(coordinator)` once per rank, at the same time; give the coordinator on as `process_group`.

    Returns:
        What each rank returned or raised, in rank order.
    """
    meeting = _Meeting(world_size, timeout)
    outcomes: list[Result | BaseException] = [RuntimeError("did not run")] * world_size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = function(_ThreadCoordinator(rank, world_size, meeting))
        except Exception as error:
            outcomes[rank] = error
        except BaseException as error:
            outcomes[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def run_on_threads(
    function: Callable[[Coordinator], Result], world_size: int, *, timeout: float = 60.0
) -> list[Result]:
    """As `outcomes_on_threads`, but raises what the first failed rank raised."""
    results: list[Result] = []
    for outcome in outcomes_on_threads(function, world_size, timeout=timeout):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results
