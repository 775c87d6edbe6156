"""The cost of disturbances to a run: seconds to the next step, steps lost, goodput."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nxd_elastic.chaos.disturb import Disturbance
from nxd_elastic.chaos.follow import FollowedRun


@dataclass(frozen=True)
class Measures:
    """Measurements from outside, from the metrics.

    Attributes:
        recoveries: seconds from each loss of a rank to the next step, in order; losses without a following step are
            omitted.
        steps_lost: for each of them, the number of steps in the metrics that had to be repeated.
        goodput: the time that the steps take without disturbances, as a share of the seconds from the first step to the
            last; nan if too few steps were seen.
    """

    recoveries: Sequence[float]
    steps_lost: Sequence[int]
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
