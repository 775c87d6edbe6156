"""Times a training step of a Llama on two tensor-parallel ranks beside one process and beside torch's DTensor.

    python tools/bench/tp_step.py [--rounds 11] [--profile]

Takes about two minutes on two idle cores, and leaves nothing behind. Measured is forward, backward and AdamW, of

- the floor: plain PyTorch in one process with two threads, which communicates nothing;
- ours on two ranks with one thread each, without and with sequence parallelism;
- the same plain model under torch's `parallelize_module` on two ranks, in four variants of which the best counts;
- a tiny model on two ranks, whose time is that of many short collectives, and ours over gloo instead of shared memory;
- the same at world size one: the overhead of the layers themselves.

All start from the same weights, and the losses are checked to be equal. Times are medians over rounds in which
each variant has its turn; ratios are medians of each round's ratio. Run it on idle cores: on busy ones the floor
suffers most, because its two threads wait for one another at every operator.
"""

import argparse
import sys

from processes.surroundings import print_surroundings
from training_step import report
from training_step.rounds import Entry, check_losses, measure
from training_step.sizes import LARGE, TINY
from training_step.team import Layout, Team
from training_step.variants import DTENSOR, OURS, OURS_OVER_GLOO, OURS_SEQUENCE_PARALLEL, PLAIN

WARM_UP = 3


def main() -> int:
    options = parse_arguments()
    print_surroundings(options.rounds)
    compare_on_two_ranks(options.rounds, with_profile=options.profile)
    compare_tiny_on_two_ranks(options.rounds)
    compare_on_one_rank(options.rounds)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="also say where the time goes")
    return parser.parse_args()


def compare_on_two_ranks(rounds: int, *, with_profile: bool) -> None:
    """The large model: time and number of collectives."""
    one_process = Layout(ranks=1, threads=2, size=LARGE, variants=(PLAIN, OURS))
    two_ranks = Layout(ranks=2, threads=1, size=LARGE, variants=(OURS, OURS_SEQUENCE_PARALLEL, *DTENSOR))
    with Team(one_process) as solo, Team(two_ranks) as pair:
        floor = Entry("plain PyTorch, 1 process x 2 threads (the floor)", solo, PLAIN)
        ours_alone = Entry("ours, 1 process x 2 threads", solo, OURS)
        ours = Entry("ours, TP 2", pair, OURS)
        ours_sequence_parallel = Entry("ours, TP 2, sequence parallel", pair, OURS_SEQUENCE_PARALLEL)
        dtensor = [Entry(f"{variant.name}, TP 2", pair, variant) for variant in DTENSOR]
        entries = [floor, ours_alone, ours, ours_sequence_parallel, *dtensor]

        timings = measure(entries, rounds=rounds, steps_per_turn=1, warm_up=WARM_UP)
        check_losses(entries, steps=WARM_UP)
        best = min(dtensor, key=lambda entry: timings[entry].median)
        print(f"\nLlama: {LARGE}")
        report.print_times(timings, {"floor": floor, "DTensor's best": best})
        report.print_target("TP 2 by the floor", timings[ours].ratio_to(timings[floor]), at_most=1.05)
        report.print_target("DTensor's best by TP 2", timings[best].ratio_to(timings[ours]), at_least=1.15)
        report.print_collectives([ours, ours_sequence_parallel, *dtensor])
        if with_profile:
            report.print_phases(timings)
            report.print_traffic([ours, ours_sequence_parallel])
            report.print_operators([floor, ours])


def compare_tiny_on_two_ranks(rounds: int) -> None:
    """The tiny model: the latency of collectives."""
    layout = Layout(ranks=2, threads=1, size=TINY, variants=(OURS, OURS_OVER_GLOO, OURS_SEQUENCE_PARALLEL, *DTENSOR))
    with Team(layout) as pair:
        entries = [Entry(f"{variant.name}, TP 2", pair, variant) for variant in layout.variants]
        ours, over_gloo, _, *dtensor = entries
        timings = measure(entries, rounds=rounds, steps_per_turn=21, warm_up=WARM_UP)
        check_losses(entries, steps=WARM_UP)
        best = min(dtensor, key=lambda entry: timings[entry].median)
        print(f"\nTiny Llama on two ranks: {TINY}")
        report.print_times(timings, {"ours": ours, "gloo": over_gloo, "DTensor's best": best})


def compare_on_one_rank(rounds: int) -> None:
    """The tiny model: overhead of the layers alone."""
    layout = Layout(ranks=1, threads=1, size=TINY, variants=(PLAIN, OURS, *DTENSOR))
    with Team(layout) as solo:
        entries = [Entry(variant.name, solo, variant) for variant in layout.variants]
        plain, ours, *dtensor = entries
        timings = measure(entries, rounds=rounds, steps_per_turn=21, warm_up=WARM_UP)
        check_losses(entries, steps=WARM_UP)
        best = min(dtensor, key=lambda entry: timings[entry].median)
        print(f"\nTiny Llama at world size one: {TINY}")
        report.print_times(timings, {"plain": plain, "DTensor's best": best})
        report.print_target("ours by plain", timings[ours].ratio_to(timings[plain]), at_most=1.5)


if __name__ == "__main__":
    sys.exit(main())
