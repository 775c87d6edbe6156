"""Diagnostics of a run: finds the rank, stage or replica that the others wait for, and reports histograms of gradients.

Each rank measures the seconds of its steps minus the time it waited for other ranks, and all compare this number when a
step is logged. Not on accelerators, where the device queue waits instead of the process.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median_low
from weakref import ref

import torch
from nxd_optim import GradientHistogram, GradientHistograms
from nxd_state import (
    Mesh,
    all_gather,
    all_gather_object,
    get_group,
    get_mesh,
    get_world_group,
    is_cpu,
    is_lazy_device,
    wait_seconds,
)
from nxd_state.parameter_marks import is_tied_copy

from nxd_trainer.report.trackers import TensorBoardTracker
from nxd_trainer.training.run_state import RunState

SLOW = 1.5  # times the seconds of the others
_SECONDS_THAT_COUNT = 0.01  # of a step, more than the others
_REPORT_AFTER = 5  # logged steps in a row: a brief delay does not make a rank slow


@dataclass(frozen=True)
class Straggler:
    """A slow rank, stage or replica."""

    name: str  # name such as "stage 1", "replica 0" or "rank 3 (stage 1, replica 0)"
    slowdown: float  # its compute time relative to the median rank


class StragglerWatch:
    """Measures this rank's steps, and compares them with those of the others.

    Args:
        warn: function that logs a line when a rank stays slow, and when it no longer is.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._busy, self._steps = 0.0, 0
        self._name: str | None = None
        self._in_a_row = 0
        self._is_reported = False
        self._compares = is_cpu() and get_world_group().size > 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step of this rank."""
        began, waited = time.perf_counter(), wait_seconds()
        yield
        self._busy += time.perf_counter() - began - (wait_seconds() - waited)
        self._steps += 1

    def compare(self) -> Straggler | None:
        """Return the straggler of the steps since the last call; None if there is none. Call it on all ranks."""
        if not self._compares:
            return None
        busy = torch.tensor([self._busy / max(1, self._steps)], dtype=torch.float64)
        self._busy, self._steps = 0.0, 0
        found = find_straggler(all_gather(busy, get_world_group()).tolist(), get_mesh())
        self._report(found)
        return found

    def _report(self, found: Straggler | None) -> None:
        name = None if found is None else found.name
        if name != self._name:
            if self._is_reported:
                self._warn(f"{self._name} is no longer slow")
            self._name, self._in_a_row, self._is_reported = name, 0, False
        self._in_a_row += 1
        if found is not None and self._in_a_row == _REPORT_AFTER:
            self._is_reported = True
            self._warn(f"{found.name} is slow: it computes {found.slowdown:.1f} times as long as others, which wait")


def find_straggler(busy: Sequence[float], mesh: Mesh) -> Straggler | None:
    """Find the straggler, given the seconds that each rank computes in a step; None if there is none.

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


def report_gradients(state: RunState) -> None:
    """Start to send histograms of the gradients of all pipeline stages to TensorBoard, as the recipe says.

    Call it on all ranks, when the trackers are open. Raises ValueError if the device records graphs.
    """
    every = state.recipe.train.gradient_histograms_every
    if not every:
        return
    if is_lazy_device():
        raise ValueError(f"train.gradient_histograms_every={every} does not support XLA; set it to 0")
    trackers = [it for it in state.trackers if isinstance(it, TensorBoardTracker)]
    run = ref(state)  # the optimizer's hooks would keep the run, and its lock, alive

    def step() -> int:
        state = run()
        assert state is not None  # it takes the step
        return state.step + 1

    trained = [(name, it) for name, it in state.model.named_parameters() if it.requires_grad]
    own = [(name, it) for name, it in trained if not is_tied_copy(it)]

    def report(number: int, of_stage: dict[str, GradientHistogram]) -> None:
        stages = all_gather_object(of_stage, get_group("pp"))
        histograms = {name: histogram for stage in stages for name, histogram in stage.items()}
        for tracker in trackers:
            tracker.log_gradients(number, histograms)

    GradientHistograms(state.optimizer.optimizer, own, report, every=every, step=step)
