"""What the ranks of a team can be asked: to take steps, to say what they hold meanwhile, and where the time goes."""

import cProfile
import io
import pstats
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, thread_time

import torch.distributed as dist
from nxd_pipeline.timeline import BubbleReport

from pipeline_step.floor import Alone, build_alone, one_forward_one_backward_floor
from pipeline_step.memory import held_bytes
from pipeline_step.model import Size
from pipeline_step.team import Team
from pipeline_step.variants import Step, Variant, build_ours

WARM_UP = 2
TRACED_STEPS = 4


@dataclass(frozen=True)
class StepTime:
    """One step of one rank: seconds on the wall, and of the processor in the thread that drives it; its loss."""

    wall: float
    host: float
    loss: float


@dataclass(frozen=True)
class Timing:
    """A variant's steps, one per round: the times of the slowest rank."""

    walls: tuple[float, ...]
    hosts: tuple[float, ...]
    loss: float

    @property
    def wall(self) -> float:
        """Seconds, the median."""
        return median(self.walls)

    @property
    def host(self) -> float:
        """Seconds, the median."""
        return median(self.hosts)

    def ratio_to(self, others: tuple[float, ...]) -> float:
        """Median over the rounds of this one's time by the other's: both had the machine at nearly the same moment."""
        return median(a / b for a, b in zip(self.walls, others, strict=True))


@cache
def _built(variant: Variant) -> Step:
    return variant.build()


@cache
def _built_alone(size: Size, num_microbatches: int) -> Alone:
    return build_alone(size, num_microbatches)


def take_steps(variant: Variant, count: int) -> list[StepTime]:
    """Some steps; called on all ranks."""
    step, times = _built(variant), []
    for _ in range(count):
        dist.barrier()
        wall, host = perf_counter(), thread_time()
        loss = step()
        times.append(StepTime(perf_counter() - wall, thread_time() - host, loss))
    return times


def compute_alone(size: Size, num_microbatches: int) -> tuple[float, float]:
    """Seconds of a forward and a backward of this rank's layers without messages; called on all ranks."""
    return _built_alone(size, num_microbatches)()


def hold(variant: Variant) -> int:
    """Bytes that a step holds at most on this rank, once all gradients are there."""
    step = _built(variant)
    step()
    return held_bytes(step)


def trace(variant: Variant) -> BubbleReport:
    """The idle part of a step, as our timeline measures it."""
    with TemporaryDirectory() as folder:
        pipeline = build_ours(variant, Path(folder) / "trace.json")
        for _ in range(TRACED_STEPS):
            pipeline.step()
        dist.barrier()  # before the folder goes
    return pipeline.model.bubble_report()


def profile(variant: Variant, count: int) -> str:
    """The functions in which the thread that drives this rank's steps spends most of the processor's time."""
    step = _built(variant)
    profiler = cProfile.Profile(thread_time)  # waiting does not count, nor what else runs on the machine
    profiler.runcall(_repeat, step, count)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(25)
    return text.getvalue()


def measure(
    team: Team, variants: list[Variant], rounds: int, *, steps_per_turn: int = 1
) -> tuple[dict[Variant, Timing], tuple[float, ...]]:
    """Times of all variants, and the floor of 1F1B, in rounds; each round begins with another one."""
    size, num_microbatches = variants[0].size, variants[0].num_microbatches
    losses = {variant: _slowest(team.call(take_steps, variant, WARM_UP)).loss for variant in variants}
    steps: dict[Variant, list[StepTime]] = {variant: [] for variant in variants}
    floors = []
    for first in range(rounds):
        floors.append(
            one_forward_one_backward_floor(team.call(compute_alone, size, num_microbatches), num_microbatches)
        )
        for offset in range(len(variants)):
            variant = variants[(first + offset) % len(variants)]
            steps[variant].append(_slowest(team.call(take_steps, variant, steps_per_turn)))
    timings = {
        variant: Timing(tuple(it.wall for it in taken), tuple(it.host for it in taken), losses[variant])
        for variant, taken in steps.items()
    }
    return timings, tuple(floors)


def _slowest(of_ranks: list[list[StepTime]]) -> StepTime:
    """The median step, of the slowest rank; the loss is on one of them."""
    steps = [
        StepTime(max(it.wall for it in ranks), max(it.host for it in ranks), sum(it.loss for it in ranks))
        for ranks in zip(*of_ranks, strict=True)
    ]
    return sorted(steps, key=lambda step: step.wall)[len(steps) // 2]


def _repeat(step: Callable[[], object], count: int) -> None:
    for _ in range(count):
        step()
