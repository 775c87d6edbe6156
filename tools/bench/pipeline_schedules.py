"""Prints each pipeline schedule's bubble and peak activations, simulated, for many sizes.

    python tools/bench/pipeline_schedules.py [--forward 1] [--backward-input 1] [--backward-weight 1] [--latency 0]

Takes about five seconds, and leaves nothing behind. Nothing is timed: a stage's times are given, in any unit, for all
layers of a rank; where a rank has two stages, each takes half. Printed are

- the bubble: the part of all ranks' time, from the first computation to the last, in which they do not compute;
- the peak: how many microbatches' activations the fullest rank keeps at once, for all its layers.
"""

import argparse
import sys

from nxd_pipeline import Costs, Schedule, StageCost, insert_communication, make_schedule, simulate, verify_schedule

METHODS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
PIPELINE_SIZES = (2, 4, 8, 16)
NUMBERS_OF_MICROBATCHES = (4, 8, 16, 32, 64)


def main() -> int:
    options = parse_arguments()
    print("bubble, and peak activations in microbatches of a whole rank")
    for pipeline_size in PIPELINE_SIZES:
        print()
        heads = (f"{f'M {number}':>14}" for number in NUMBERS_OF_MICROBATCHES)
        print(f"{f'PP {pipeline_size}':14}{''.join(heads)}")
        for name in METHODS:
            schedules = (make_schedule(name, pipeline_size, number) for number in NUMBERS_OF_MICROBATCHES)
            cells = [cell(schedule, options) for schedule in schedules]
            print(f"{name:14}{''.join(cells)}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward", type=float, default=1.0, help="time of a rank's forward (default: %(default)s)")
    parser.add_argument("--backward-input", type=float, default=1.0, help="of its inputs' gradients")
    parser.add_argument("--backward-weight", type=float, default=1.0, help="of its weights' gradients")
    parser.add_argument("--latency", type=float, default=0.0, help="of a message between two ranks")
    return parser.parse_args()


def cell(computation: Schedule, options: argparse.Namespace) -> str:
    """Bubble and peak of a schedule, once it is verified."""
    schedule = insert_communication(computation)
    stages_per_rank = schedule.num_stages // schedule.num_ranks
    cost = StageCost(
        forward=options.forward / stages_per_rank,
        backward_input=options.backward_input / stages_per_rank,
        backward_weight=options.backward_weight / stages_per_rank,
    )
    timeline = simulate(schedule, Costs(cost, latency=options.latency))
    peak = max(verify_schedule(schedule)) / stages_per_rank
    return f"{timeline.bubble_fraction:>8.1%} {peak:>5.4g}"


if __name__ == "__main__":
    sys.exit(main())
