"""Times attention, forward and backward, over context-parallel ranks, beside torch's own ring attention.

    python tools/bench/cp.py [--ranks 2] [--lengths 4096 16384] [--rounds 5]

Takes three minutes or so on two idle cores, and leaves nothing behind. Measured is causal attention of one sequence in
float32, of

- each transport of `nxd_layers.context.context_parallel_attention`, one thread for each rank;
- the ring attention of torch's experimental `context_parallel`, on the same ranks, over gloo;
- one process with as many threads as there are ranks, and the whole sequence: nothing is sent.

Variants take turns in each round; ratios are of medians. Our outputs are checked against those of one process.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from layer_bench.torch_ring import torch_ring_attention
from nxd_layers.context import (
    AttentionPlan,
    MaskRule,
    SequenceCut,
    Transport,
    context_parallel_attention,
    interval_mask,
)
from nxd_state import destroy_model_parallel, get_group, initialize_model_parallel
from nxd_testing import RankPool
from processes.surroundings import print_surroundings
from torch import Tensor
from torch.nn import functional as F

HEADS, KV_HEADS, SIZE = 8, 2, 64
TRANSPORTS: tuple[Transport, ...] = ("ring", "all_gather", "all_to_all")
TOLERANCE = 1e-4
Step = Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="context-parallel ranks (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="positions of the sequence")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant (default: %(default)s)")
    options = parser.parse_args()
    print_surroundings(options.rounds)
    with RankPool() as pool:
        for length in options.lengths:
            (alone,) = pool.run(time_alone, 1, length, options.ranks, options.rounds, timeout=900.0)
            seconds = pool.run(time_over_ranks, options.ranks, length, options.rounds, timeout=900.0)[0]
            print(f"{length} positions: one process, {options.ranks} threads {1e3 * alone:8.1f} ms")
            for name, value in seconds.items():
                print(f"  {name:28}{1e3 * value:8.1f} ms  {value / alone:5.2f} x one process")
    return 0


def time_alone(length: int, threads: int, rounds: int) -> float:
    """The median seconds of a step of the whole sequence in this process."""
    torch.set_num_threads(threads)
    query, key, value, weight = whole_inputs(length)
    for leaf in (query, key, value):
        leaf.requires_grad_()

    def step() -> None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        output.backward(weight)

    return medians({"one process": step}, rounds)["one process"]


def time_over_ranks(length: int, rounds: int) -> dict[str, float]:
    """The median seconds of a step of each variant on these ranks."""
    torch.set_num_threads(1)
    world = dist.get_world_size()
    initialize_model_parallel(context_parallel_size=world)
    steps: dict[str, Step] = {transport: our_step(length, world, transport) for transport in TRANSPORTS}
    steps["torch's ring"] = step_of_torch(length, world)
    found = medians(steps, rounds)
    destroy_model_parallel()
    return found


def our_step(length: int, world: int, transport: Transport) -> Step:
    """Attention of this rank's positions; its output is checked."""
    rank, cut = get_group("cp").rank, SequenceCut(length, world)
    query, key, value, weight = whole_inputs(length)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    leaves = [cut.part_of(it, rank, dim=2).requires_grad_() for it in (query, key, value)]
    grad, wanted = (cut.part_of(it, rank, dim=2) for it in (weight, expected))

    def step() -> None:
        plan = AttentionPlan(interval_mask(length, MaskRule()), cut)
        query, key, value = leaves
        output = context_parallel_attention(query, key, value, plan, transport=transport)
        output.backward(grad)
        assert torch.allclose(output, wanted, rtol=TOLERANCE, atol=TOLERANCE)

    return step


def step_of_torch(length: int, world: int) -> Step:
    """Causal attention by torch's ring; its output is checked.

    Its CPU kernel takes as many key heads as query heads, so that they are repeated, as torch's attention does.
    """
    rank, cut = dist.get_rank(), SequenceCut(length, world)
    query, key, value, weight = whole_inputs(length)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    leaves = [cut.part_of(it, rank, dim=2).requires_grad_() for it in (query, key, value)]
    grad, wanted = (cut.part_of(it, rank, dim=2) for it in (weight, expected))

    def step() -> None:
        query, key, value = leaves
        key, value = (it.repeat_interleave(HEADS // KV_HEADS, 1) for it in (key, value))
        output = torch_ring_attention(query, key, value)
        output.backward(grad)
        assert torch.allclose(output, wanted, rtol=TOLERANCE, atol=TOLERANCE)

    return step


def whole_inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and the gradient of the output: `[1, heads, length, head]`."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, heads, length, SIZE, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )  # type: ignore[return-value]


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Seconds of each step, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):  # the first is to warm up
        for name, step in steps.items():
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            step()
            if dist.is_initialized():
                dist.barrier()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
