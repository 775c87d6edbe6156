"""Times each layer, forward and backward, beside torch's own and beside DTensor; counts a decoder layer's collectives.

    python tools/bench/layers.py [--rounds 21]

Takes about three minutes on two idle cores, and leaves nothing behind. At TP 1 the rival is torch's own layer in the
same process, and CPU time is what counts; on two ranks it is the same layer under `parallelize_module`, and time is
that of the slower rank. Each has one thread. Ours and the rival take turns, and a ratio is the median of the rounds'
ratios. The bytes are those that each rank must send.
"""

import argparse
import os
import sys
from statistics import median

import torch
from layer_bench.cases import BATCH, CASES, HIDDEN, ROWS, VOCAB
from layer_bench.decoder_layer import decoder_layer_traffic, least_bytes
from layer_bench.ranks import on_ranks
from layer_bench.timing import Comparison, compare
from training_step.report import milliseconds, print_row, print_target


def main() -> int:
    options = parse_arguments()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print(f"{ROWS * BATCH} tokens, hidden {HIDDEN}, vocabulary {VOCAB}, float32")
    print_comparisons(1, "torch's own", options.rounds, at_most=1.03)
    print_comparisons(2, "DTensor", options.rounds, at_most=1.0)
    print_traffic()
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="turns of each layer (default: %(default)s)")
    return parser.parse_args()


def print_comparisons(tensor_parallel: int, rival: str, rounds: int, *, at_most: float) -> None:
    """All layers beside their rivals, in milliseconds."""
    print()
    print_row(f"TP {tensor_parallel}, ms forward and backward, medians", "ours", rival, "ours / rival", width=14)
    found: dict[str, Comparison] = {}
    for name in CASES:
        found[name] = on_ranks(tensor_parallel, compare, name, rounds)[0]
        times = (milliseconds(median(seconds)) for seconds in (found[name].ours, found[name].rival))
        print_row(name, *times, f"{found[name].ratio:.3f}", width=14)
    slowest = max(found, key=lambda name: found[name].ratio)
    print_target(f"the slowest beside {rival}, {slowest}", found[slowest].ratio, at_most=at_most)


def print_traffic() -> None:
    """What a decoder layer sends, beside the least that would do."""
    print()
    print_row("a decoder layer's collectives", "KB sent", "least", width=14)
    for sequence_parallel in (False, True):
        forward, backward = on_ranks(2, decoder_layer_traffic, sequence_parallel)[0]
        for direction, (number, bytes_sent) in (("forward", forward), ("backward", backward)):
            kinds = ", ".join(f"{count} {kind}" for kind, count in number.items())
            label = f"TP 2{', sequence parallel' if sequence_parallel else ''}, {direction}: {kinds}"
            print_row(label, f"{bytes_sent / 1e3:.1f}", f"{least_bytes(2) / 1e3:.1f}", width=14)


if __name__ == "__main__":
    sys.exit(main())
