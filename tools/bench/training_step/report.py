"""The tables that `tp_step` prints."""

from collections.abc import Mapping, Sequence
from statistics import median

from training_step.operators import count_collectives, time_operators
from training_step.rounds import Entry, Timing
from training_step.traffic import measure_traffic

REPEATS = 5  # of what is measured only for the profile
LONGEST_OPERATORS = 12


def print_times(timings: Mapping[Entry, Timing], references: Mapping[str, Entry]) -> None:
    """Median and fastest step of each entry, and its time by that of the references."""
    print_row("ms per step", "median", "fastest", *(f"/ {name}" for name in references))
    for entry, timing in timings.items():
        ratios = [f"{timing.ratio_to(timings[reference]):.3f}" for reference in references.values()]
        print_row(entry.label, milliseconds(timing.median), milliseconds(timing.minimum), *ratios)


def print_target(name: str, ratio: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
    """A ratio beside what it should be."""
    met = (at_most is None or ratio <= at_most) and (at_least is None or ratio >= at_least)
    wanted = f"at most {at_most}" if at_most is not None else f"at least {at_least}"
    print(f"{name}: {ratio:.3f}, target {wanted}: {'met' if met else 'missed'}")


def print_collectives(entries: Sequence[Entry]) -> None:
    """How many collectives a step makes."""
    print("\ncollectives of a step")
    for entry in entries:
        counts = entry.team.call(count_collectives, entry.variant)[0]
        by_kind = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
        print_row(entry.label, f"{sum(counts.values())}", f"  {by_kind}")


def print_phases(timings: Mapping[Entry, Timing]) -> None:
    """Median of each phase."""
    print()
    print_row("ms per phase, medians", "forward", "backward", "AdamW")
    for entry, timing in timings.items():
        phases = [[time.forward, time.backward, time.optimizer] for time in timing.rounds]
        print_row(entry.label, *(milliseconds(median(phase)) for phase in zip(*phases, strict=True)))


def print_traffic(entries: Sequence[Entry]) -> None:
    """Number, size and cost of each entry's collectives, on rank 0."""
    print()
    print_row("collectives by kind, rank 0", "number", "MB", "ms waited")
    for entry in entries:
        steps = [entry.team.call(measure_traffic, entry.variant)[0] for _ in range(REPEATS)]
        for kind, traffic in steps[0].items():
            waited = median(step[kind].seconds_waited for step in steps)
            print_row(f"{entry.label}: {kind}", f"{traffic.number}", f"{traffic.bytes / 1e6:.2f}", milliseconds(waited))


def print_operators(entries: Sequence[Entry]) -> None:
    """The operators that take longest, on rank 0."""
    columns = []
    for entry in entries:
        steps = [entry.team.call(time_operators, entry.variant)[0] for _ in range(REPEATS)]
        names = set().union(*steps)
        columns.append({name: median(step.get(name, 0.0) for step in steps) for name in names})
    longest = sorted(set().union(*columns), key=lambda name: -max(column.get(name, 0.0) for column in columns))
    print()
    print_row("ms in operators, rank 0, medians", *(entry.label.split(" (")[0] for entry in entries), width=36)
    for name in longest[:LONGEST_OPERATORS]:
        print_row(name, *(milliseconds(column.get(name, 0.0)) for column in columns), width=36)


def print_row(label: str, *cells: str, width: int = 18) -> None:
    print(f"{label:58}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
