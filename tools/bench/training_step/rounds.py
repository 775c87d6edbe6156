"""Measuring many variants fairly on a machine that is never quite the same: in rounds, each taking all in turn."""

from dataclasses import dataclass
from functools import partial
from statistics import median

from training_step.step import StepTime, Trainee
from training_step.team import Team
from training_step.variants import Variant


@dataclass(frozen=True)
class Entry:
    """A variant, and the team that computes it."""

    label: str
    team: Team
    variant: Variant


@dataclass(frozen=True)
class Timing:
    """One entry's steps: per round, that of median length."""

    rounds: list[StepTime]

    @property
    def median(self) -> float:
        """Seconds."""
        return median(time.total for time in self.rounds)

    @property
    def minimum(self) -> float:
        """Seconds."""
        return min(time.total for time in self.rounds)

    def ratio_to(self, other: "Timing") -> float:
        """Median over the rounds of this one's time by the other's: both had the machine at the same moment."""
        return median(a.total / b.total for a, b in zip(self.rounds, other.rounds, strict=True))


def measure(entries: list[Entry], *, rounds: int, steps_per_turn: int, warm_up: int) -> dict[Entry, Timing]:
    """Time all entries; each round starts with another one, so that nobody always comes after the same."""
    for entry in entries:
        entry.team.call(partial(_steps, count=warm_up), entry.variant)
    times: list[list[StepTime]] = [[] for _ in entries]
    for first in range(rounds):
        for offset in range(len(entries)):
            index = (first + offset) % len(entries)
            entry = entries[index]
            by_rank = entry.team.call(partial(_steps, count=steps_per_turn), entry.variant)
            slowest_ranks = [max(of_ranks, key=_total) for of_ranks in zip(*by_rank, strict=True)]
            times[index].append(sorted(slowest_ranks, key=_total)[steps_per_turn // 2])
    return {entry: Timing(of_entry) for entry, of_entry in zip(entries, times, strict=True)}


def _steps(trainee: Trainee, count: int) -> list[StepTime]:
    return [trainee.step() for _ in range(count)]


def _total(time: StepTime) -> float:
    return time.total


def check_losses(entries: list[Entry], *, steps: int) -> None:
    """Check that all entries have computed the same: their losses, after each of the first `steps` steps.

    Raises:
        RuntimeError: they have not, so that comparing their times would be pointless.
    """
    expected = entries[0].team.call(_losses, entries[0].variant)[0][:steps]
    for entry in entries:
        for losses in entry.team.call(_losses, entry.variant):
            if any(abs(a - b) > 1e-5 * abs(b) for a, b in zip(losses, expected, strict=False)):
                raise RuntimeError(
                    f"losses of {entry.label!r} {losses[:steps]} differ from those of {entries[0].label!r} {expected}"
                )


def _losses(trainee: Trainee) -> list[float]:
    return trainee.losses
