"""Finds the rank, stage or replica that the others wait for, and how slow it is.

Each rank measures the seconds of its steps minus the time it waited for other ranks, and all compare this one number
when a step is logged. Not on accelerators, where the device queue waits instead of the process.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median_low

import torch
from nxd_state import Mesh, all_gather, get_mesh, get_world_group, is_host, wait_seconds

SLOW = 1.5  # times the seconds of the others
_SECONDS_THAT_COUNT = 0.01  # of a step, more than the others
_TELL_AFTER = 5  # logged steps in a row: a brief delay does not make a rank slow


@dataclass(frozen=True)
class Straggler:
    """A slow rank, stage or replica.

    Attributes:
        name: name such as "stage 1", "replica 0" or "rank 3 (stage 1, replica 0)".
        slowdown: its compute time relative to the median rank.
    """

    name: str
    slowdown: float


class StragglerWatch:
    """Measures this rank's steps, and compares them with those of the others.

    Args:
        warn: logs a line when something stays slow, and when it no longer is.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._busy, self._steps = 0.0, 0
        self._name: str | None = None
        self._in_a_row = 0
        self._is_told = False
        self._compares = is_host() and get_world_group().size > 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step of this rank."""
        began, waited = time.perf_counter(), wait_seconds()
        yield
        self._busy += time.perf_counter() - began - (wait_seconds() - waited)
        self._steps += 1

    def compare(self) -> Straggler | None:
        """Return what was slow in the steps since the last call; None if nothing was. Call it on all ranks."""
        if not self._compares:
            return None
        busy = torch.tensor([self._busy / max(1, self._steps)], dtype=torch.float64)
        self._busy, self._steps = 0.0, 0
        found = find_straggler(all_gather(busy, get_world_group()).tolist(), get_mesh())
        self._tell(found)
        return found

    def _tell(self, found: Straggler | None) -> None:
        name = None if found is None else found.name
        if name != self._name:
            if self._is_told:
                self._warn(f"{self._name} is no longer slow")
            self._name, self._in_a_row, self._is_told = name, 0, False
        self._in_a_row += 1
        if found is not None and self._in_a_row == _TELL_AFTER:
            self._is_told = True
            self._warn(f"{found.name} is slow: it computes {found.slowdown:.1f} times as long as others, which wait")


def find_straggler(busy: Sequence[float], mesh: Mesh) -> Straggler | None:
    """Find what is slow, given the seconds that each rank computes in a step; None if nothing is.

    The result is a stage or replica if exactly its ranks are slow; otherwise the slowest rank.
    """
    usual = median_low(busy)
    slow = {
        rank for rank, seconds in enumerate(busy) if seconds > SLOW * usual and seconds - usual > _SECONDS_THAT_COUNT
    }
    if not slow:
        return None
    slowdown = max(busy) / max(usual, 1e-9)
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    for axis, called in (("pp", "stage"), ("dp", "replica")):
        index = places[min(slow)][axis]
        ranks = {rank for rank, place in enumerate(places) if place[axis] == index}
        if len(ranks) > 1 and ranks == slow:
            return Straggler(f"{called} {index}", slowdown)
    rank = max(slow, key=lambda it: busy[it])
    return Straggler(f"rank {rank} (stage {places[rank]['pp']}, replica {places[rank]['dp']})", slowdown)
