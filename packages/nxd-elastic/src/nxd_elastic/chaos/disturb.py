"""Kills, stops and slows ranks of a run, chosen by a seed, and measures the cost from the metrics."""

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, get_args

from nxd_elastic.chaos.follow import FollowedRun, RankProcess, kill_host

# kill: SIGKILL. stop: SIGSTOP, for good. pause: SIGSTOP, and SIGCONT some seconds later. slow: both in short turns.
# absent: SIGKILL, and no other process takes its place for some seconds. host: a launcher is killed with all its ranks.
Kind = Literal["kill", "stop", "pause", "slow", "absent", "host"]


KINDS: Sequence[Kind] = get_args(Kind)


_PAUSED = (0.5, 3.0)  # seconds


_TURN = 0.1  # seconds of a slow rank: stopped for a share of it


_STOPPED_SHARE = 0.75


@dataclass(frozen=True)
class DisturbancePlan:
    """The disturbances of a run."""

    seed: int  # random seed for ranks, kinds and times
    count: int | None = None  # number of disturbances; unlimited if None
    kinds: Sequence[Kind] = ("kill",)  # kinds to choose from; one that is named twice is chosen twice as often
    # minimum and maximum number of steps from one recovery to the next disturbance, which comes at any moment of the
    # step that follows
    steps: tuple[int, int] = (2, 6)
    # minimum and maximum seconds from one disturbance to the next instead, in any state of the run, also during a
    # recovery
    seconds: tuple[float, float] | None = None
    lasting: tuple[float, float] = (5.0, 15.0)  # minimum and maximum seconds for which a rank is slow or absent

    def __post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"kinds={','.join(self.kinds)!r} contains an unknown kind; use {', '.join(KINDS)}")
        for name in ("steps", "seconds", "lasting"):
            bounds = getattr(self, name)
            if bounds is not None and not 0 <= bounds[0] <= bounds[1]:
                raise ValueError(
                    f"{name}={bounds[0]}:{bounds[1]} is not a range; pass the minimum and the maximum, such as 2:6"
                )


@dataclass(frozen=True)
class Disturbance:
    """One disturbance of a rank."""

    kind: Kind  # kind of disturbance
    rank: RankProcess  # the disturbed rank; the first one of a host
    step: int  # the newest step in the metrics at that time
    generation: int  # how often the run had begun or resumed until then
    at: float  # time on the monotonic clock
    seconds: float | None = None  # how long it lasted; None if it is permanent

    @property
    def is_a_loss(self) -> bool:
        """Whether the run has to continue without this process."""
        return self.kind not in ("pause", "slow")

    def __str__(self) -> str:
        what = {
            "kill": "killed",
            "stop": "stopped",
            "pause": "paused",
            "slow": "slowed",
            "absent": "killed, and kept from coming back,",
            "host": "killed the host of",
        }
        lasting = f" for {self.seconds:.1f} s" if self.seconds is not None else ""
        return f"after step {self.step} {what[self.kind]} rank {self.rank.number}, process {self.rank.pid}{lasting}"


def disturb(
    run: FollowedRun, plan: DisturbancePlan, say: Callable[[str], None] = lambda line: None
) -> list[Disturbance]:
    """Disturb a run as planned, call `say` with a line about each disturbance, and follow the run until it ends."""
    chance = random.Random(plan.seed)
    done: list[Disturbance] = []
    goes_on = run.wait_for_step(1)
    while goes_on and (plan.count is None or len(done) < plan.count):
        goes_on = _wait_for_moment(run, plan, chance, done)
        if goes_on and (disturbance := _disturb_once(run, plan, chance)) is not None:
            done.append(disturbance)
            say(str(disturbance))
    while run.wait(1.0):
        pass
    return done


def _wait_for_moment(
    run: FollowedRun, plan: DisturbancePlan, chance: random.Random, done: Sequence[Disturbance]
) -> bool:
    if plan.seconds is not None:
        return run.wait(chance.uniform(*plan.seconds))
    if done and done[-1].is_a_loss and not run.wait_for_generation(done[-1].generation + 1):
        return False
    return run.wait_for_step(run.step + chance.randint(*plan.steps)) and run.wait(
        chance.random() * (run.step_seconds() or 0.0)
    )


def _disturb_once(run: FollowedRun, plan: DisturbancePlan, chance: random.Random) -> Disturbance | None:
    """Disturb once; returns None if the rank has ended meanwhile, or is on the last host."""
    kind, place, duration = chance.choice(plan.kinds), chance.random(), chance.random()
    ranks = run.ranks()
    if not ranks or (kind == "host" and len({rank.host for rank in ranks}) < 2):
        run.wait(0.1)
        return None
    rank = ranks[int(place * len(ranks))]
    bounds = {"pause": _PAUSED, "slow": plan.lasting, "absent": plan.lasting}.get(kind)
    seconds = None if bounds is None else bounds[0] + duration * (bounds[1] - bounds[0])
    disturbance = Disturbance(kind, rank, run.step, run.generations, time.monotonic(), seconds)
    with suppress(ProcessLookupError):
        _HOW[kind](run, rank, seconds or 0.0)
        return disturbance
    return None


def _pause(run: FollowedRun, rank: RankProcess, seconds: float) -> None:
    with _stopped(rank.pid):
        run.wait(seconds)


def _slow(run: FollowedRun, rank: RankProcess, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with _stopped(rank.pid):
            run.wait(_STOPPED_SHARE * _TURN)
        if not run.wait((1 - _STOPPED_SHARE) * _TURN):
            return


def _kill_and_hold(run: FollowedRun, rank: RankProcess, seconds: float) -> None:
    with _stopped(rank.parent):  # so that it does not start another one
        os.kill(rank.pid, signal.SIGKILL)
        run.wait(seconds)


_HOW: Mapping[Kind, Callable[[FollowedRun, RankProcess, float], None]] = {
    "kill": lambda run, rank, seconds: os.kill(rank.pid, signal.SIGKILL),
    "stop": lambda run, rank, seconds: os.kill(rank.pid, signal.SIGSTOP),
    "pause": _pause,
    "slow": _slow,
    "absent": _kill_and_hold,
    "host": lambda run, rank, seconds: kill_host(rank.host),
}


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    try:
        os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class Measures:
    """Measurements from outside, from the metrics."""

    # seconds from each loss of a rank to the next step, in order; losses without a following step are omitted
    recoveries: Sequence[float]
    steps_lost: Sequence[int]  # for each of them, the number of steps in the metrics that had to be repeated
    # the time that the steps take without disturbances, as a share of the seconds from the first step to the last; nan
    # if too few steps were seen
    goodput: float


def measure(run: FollowedRun, disturbances: Sequence[Disturbance]) -> Measures:
    """Measure a run that has ended."""
    recoveries, lost = [], []
    for it in disturbances:
        resumed = [seen for seen in run.seen if seen.at > it.at and seen.record.layout is not None]
        if not it.is_a_loss or not resumed:
            continue
        recoveries.append(resumed[0].at - it.at)
        taken = max((seen.record.step for seen in run.seen if seen.at < resumed[0].at), default=0)
        lost.append(max(0, taken - (resumed[0].record.resumed_from or 0)))
    return Measures(recoveries, lost, _goodput(run))


def _goodput(run: FollowedRun) -> float:
    step_seconds = run.step_seconds()
    if step_seconds is None:
        return math.nan
    first, last = run.seen[0], run.seen[-1]
    seconds = last.at - first.at
    return min(1.0, (last.record.step - first.record.step) * step_seconds / seconds) if seconds > 0 else math.nan


def render(measures: Measures, disturbances: Sequence[Disturbance]) -> list[str]:
    """Return lines of text."""
    counts = {it.kind: sum(other.kind == it.kind for other in disturbances) for it in disturbances}
    lines = [f"{len(disturbances)} disturbances: {', '.join(f'{kind} {n}' for kind, n in counts.items()) or 'none'}"]
    if measures.recoveries:
        ordered = sorted(measures.recoveries)
        middle, late = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9))
        lines.append(
            f"seconds from a loss to the next step: p50 {middle:.1f}, p90 {late:.1f}, max {ordered[-1]:.1f}, "
            f"of {len(ordered)}"
        )
        lines.append(f"steps lost: {max(measures.steps_lost)} at most, {sum(measures.steps_lost)} in all")
    lines.append(f"goodput {100 * measures.goodput:.1f} %")
    return lines
