"""Times and weighs our pipeline schedules beside those of torch.distributed.pipelining, on the same model and ranks.

    python tools/bench/pp_step.py [--rounds 7] [--schedules 1f1b zb-v] [--profile]

Takes about five minutes on two idle cores, needs 4 GB, and leaves nothing behind. Measured are forward and backward
of a stack of transformer layers on two pipeline ranks with one thread each:

- the step of each schedule, ours and torch's, beside one process, and 1F1B beside its floor: the same stages computed
  on both ranks at once without messages, put together by the simulator;
- what a step holds in memory at most, beyond what it finds;
- the part of a step in which ranks are idle, by our timeline, beside what the simulator says;
- the step of a tiny model, which is all overhead.

All start from the same weights, and the losses are checked to be equal. Times are medians over rounds in which each
has its turn; ratios are medians of each round's ratio. Where torch lacks a schedule, there is nothing beside ours.
"""

import argparse
import sys
from typing import TypeVar

from pipeline_step.measurements import Timing, hold, measure, profile, trace
from pipeline_step.model import LARGE, TINY, Size
from pipeline_step.team import Team
from pipeline_step.variants import STAGES_PER_RANK, TORCHS, Variant
from processes.surroundings import print_surroundings

T = TypeVar("T")
MICROBATCHES = 4
MICROBATCHES_IN_FLIGHT = 8  # for memory and overhead
STEPS_PER_TURN_OF_TINY = 11
OVERHEAD_TARGET = 0.020  # seconds
STEPS_TO_PROFILE = 50


def main() -> int:
    options = parse_arguments()
    print_surroundings(options.rounds)
    with Team() as team:
        compare_steps(team, options.schedules, options.rounds)
        compare_memory(team, options.schedules)
        compare_bubbles(team, options.schedules)
        compare_overhead(team, options.schedules, options.rounds)
        if options.profile:
            print_profiles(team, options.schedules)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each schedule (default: %(default)s)")
    parser.add_argument("--schedules", nargs="+", choices=STAGES_PER_RANK, default=list(STAGES_PER_RANK))
    parser.add_argument("--profile", action="store_true", help="also say where the overhead is")
    return parser.parse_args()


def compare_steps(team: Team, schedules: list[str], rounds: int) -> None:
    """Steps of the large model, in turn."""
    alone = Variant("one process", "no schedule", LARGE, MICROBATCHES)
    timings, floors = measure(team, [alone, *variants(schedules, LARGE, MICROBATCHES)], rounds)
    check_losses(timings)
    print(f"\n{LARGE}, {MICROBATCHES} microbatches")
    print_row("ms per step", "ours", "torch", "ours / torch", "one process / ours")
    print_row("one process", f"{timings[alone].wall * 1e3:.0f}")
    pairs = by_schedule(timings)
    for schedule, (ours, torchs) in pairs.items():
        print_row(
            schedule,
            f"{ours.wall * 1e3:.0f}",
            "-" if torchs is None else f"{torchs.wall * 1e3:.0f}",
            "-" if torchs is None else f"{ours.ratio_to(torchs.walls):.3f}",
            f"{1 / ours.ratio_to(timings[alone].walls):.2f}",
        )
    for schedule, (ours, torchs) in pairs.items():
        if torchs is not None:
            print_target(f"{schedule}, ours by torch's", ours.ratio_to(torchs.walls), 1.0)
    for schedule in ("zb-h1", "zb-v", "dualpipe-v"):
        if {schedule, "1f1b"} <= pairs.keys():
            print_target(f"{schedule} by our 1f1b", pairs[schedule][0].ratio_to(pairs["1f1b"][0].walls), 1.0)
    if "1f1b" in pairs:
        for library, timing in zip(("ours", "torch's"), pairs["1f1b"], strict=True):
            if timing is not None:
                print_target(f"1f1b, {library} by its floor", timing.ratio_to(floors), 1.02)


def compare_memory(team: Team, schedules: list[str]) -> None:
    """What a step of the large model holds, on the fuller rank."""
    print(f"\n{MICROBATCHES_IN_FLIGHT} microbatches")
    print_row("MB held during a step, at most", "ours", "torch", "ours / torch", "ours / our gpipe")
    held = {
        variant: max(team.call(hold, variant))
        for variant in variants(["gpipe", *schedules], LARGE, MICROBATCHES_IN_FLIGHT)
    }
    pairs = by_schedule(held)
    for schedule, (ours, torchs) in pairs.items():
        print_row(
            schedule,
            f"{ours / 1e6:.1f}",
            "-" if torchs is None else f"{torchs / 1e6:.1f}",
            "-" if torchs is None else f"{ours / torchs:.3f}",
            f"{ours / pairs['gpipe'][0]:.3f}",
        )
    if "1f1b" in pairs:
        print_target("1f1b by gpipe", pairs["1f1b"][0] / pairs["gpipe"][0], 0.4)


def compare_bubbles(team: Team, schedules: list[str]) -> None:
    """The idle part of a step of the large model."""
    print(f"\n{MICROBATCHES} microbatches")
    print_row("idle, mean of the ranks", "measured", "simulated")
    for schedule in schedules:
        report = team.call(trace, Variant("ours", schedule, LARGE, MICROBATCHES))[0]
        idle = (sum(parts) / len(parts) for parts in (report.measured, report.simulated))
        print_row(schedule, *(f"{part:.1%}" for part in idle))


def compare_overhead(team: Team, schedules: list[str], rounds: int) -> None:
    """Steps of the tiny model."""
    entries = variants(schedules, TINY, MICROBATCHES_IN_FLIGHT)
    timings, _ = measure(team, entries, rounds, steps_per_turn=STEPS_PER_TURN_OF_TINY)
    check_losses(timings)
    print(f"\n{TINY}, {MICROBATCHES_IN_FLIGHT} microbatches; of the processor: in the thread that drives the step")
    print_row("ms per step", "ours", "torch", "ours, processor", "torch, processor")
    pairs = by_schedule(timings)
    for schedule, (ours, torchs) in pairs.items():
        print_row(
            schedule,
            f"{ours.wall * 1e3:.1f}",
            "-" if torchs is None else f"{torchs.wall * 1e3:.1f}",
            f"{ours.host * 1e3:.1f}",
            "-" if torchs is None else f"{torchs.host * 1e3:.1f}",
        )
    for schedule, (ours, _) in pairs.items():
        print_target(f"{schedule}, ms of a tiny step", ours.wall * 1e3, OVERHEAD_TARGET * 1e3)


def print_profiles(team: Team, schedules: list[str]) -> None:
    """Where the time of the tiny model's steps goes on rank 0."""
    for schedule in schedules:
        variant = Variant("ours", schedule, TINY, MICROBATCHES_IN_FLIGHT)
        print(f"\n{variant}, {STEPS_TO_PROFILE} steps, rank 0\n{team.call(profile, variant, STEPS_TO_PROFILE)[0]}")


def variants(schedules: list[str], size: Size, num_microbatches: int) -> list[Variant]:
    """Both libraries' schedules, those of one name side by side."""
    return [
        Variant(library, schedule, size, num_microbatches)
        for schedule in dict.fromkeys(schedules)
        for library in ("ours", "torch")
        if library == "ours" or schedule in TORCHS
    ]


def by_schedule(values: dict[Variant, T]) -> dict[str, tuple[T, T | None]]:
    """Ours and torch's of each schedule."""
    names = {(variant.library, variant.schedule): value for variant, value in values.items()}
    return {name: (value, names.get(("torch", name))) for (library, name), value in names.items() if library == "ours"}


def check_losses(timings: dict[Variant, Timing]) -> None:
    """Raise a RuntimeError unless all have computed the same."""
    expected = next(iter(timings.values())).loss
    for variant, timing in timings.items():
        if abs(timing.loss - expected) > 1e-5 * abs(expected):
            raise RuntimeError(f"the loss of {variant} is {timing.loss}, that of others {expected}")


def print_target(name: str, value: float, at_most: float) -> None:
    print(f"{name}: {value:.3f}, target at most {at_most:g}: {'met' if value <= at_most else 'missed'}", flush=True)


def print_row(label: str, *cells: str) -> None:
    print(f"{label:34}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
