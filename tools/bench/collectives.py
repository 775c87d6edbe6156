"""Times collectives through shared memory beside the same ones over gloo, in the same processes, taking turns.

    python tools/bench/collectives.py [--ranks 2 4] [--rounds 9] [--largest-mib 64]

Takes about five minutes on two idle cores, and leaves nothing behind. Each line is one operation at one size: the
median over rounds of the mean time of one call, over gloo and through shared memory, and the median of each round's
ratio. Sizes are those of the tensor that each rank gives. On busy cores both wait for ranks that are not running,
so that the ratios say little.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import nxd_state
import torch
import torch.distributed as dist
from nxd_state import Group
from processes.rank_processes import RankProcesses
from processes.surroundings import print_surroundings
from torch import Tensor

KIB, MIB = 2**10, 2**20
SIZES = (4, 256, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB, 64 * MIB)  # bytes
SECONDS_PER_TURN = 0.1
WARM_UP_TURNS = 3  # each with as many calls as the one before says: the first calls are slow


class Case(NamedTuple):
    """One operation at one size, over gloo or through shared memory, so many times."""

    operation: str
    nbytes: int
    is_shared: bool
    calls: int


def main() -> int:
    options = parse_arguments()
    print_surroundings(options.rounds)
    sizes = [size for size in SIZES if size <= options.largest_mib * MIB]
    for ranks in options.ranks:
        with RankProcesses(ranks, serve, ranks) as processes:
            print(f"\n{ranks} ranks{'':12}       gloo     shared    ratio")
            for operation in OPERATIONS:
                for nbytes in sizes if operation != "barrier" else [0]:
                    print_line(operation, nbytes, *measure(processes, operation, nbytes, options.rounds), flush=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each transport (default: %(default)s)")
    parser.add_argument("--largest-mib", type=float, default=64, help="largest tensor (default: %(default)s)")
    return parser.parse_args()


def measure(processes: RankProcesses, operation: str, nbytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds per call over gloo and through shared memory, by round."""
    times: dict[bool, list[float]] = {False: [], True: []}
    calls = dict.fromkeys(times, 1)
    for turn in range(WARM_UP_TURNS + rounds):
        for is_shared, of_transport in times.items():
            case = Case(operation, nbytes, is_shared, calls[is_shared])
            seconds = max(processes.request(case, f"at {case}"))
            if turn < WARM_UP_TURNS:
                calls[is_shared] = max(2, min(5000, int(SECONDS_PER_TURN / seconds)))
            else:
                of_transport.append(seconds)
    return times[False], times[True]


def print_line(operation: str, nbytes: int, gloo: list[float], shared: list[float], *, flush: bool) -> None:
    ratio = statistics.median(a / b for a, b in zip(gloo, shared, strict=True))
    times = "".join(f"{statistics.median(seconds) * 1e6:9.1f}us" for seconds in (gloo, shared))
    print(f"{operation:<15}{readable(nbytes):>8}{times}{ratio:8.1f}x", flush=flush)


def readable(nbytes: int) -> str:
    for unit, size in (("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"


def serve(ranks: int, rank: int, store: Path, connection: Connection) -> None:
    """Be one rank: time what the parent asks for until it hangs up."""
    torch.set_num_threads(1)
    os.environ["NXD_SHM"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    nxd_state.initialize_model_parallel(ranks)
    shared = nxd_state.get_group("tp")
    gloo = replace(shared, shared_memory=None)
    while True:
        try:
            case: Case = connection.recv()
        except EOFError:
            break
        connection.send(time_calls(case, shared if case.is_shared else gloo))
    nxd_state.destroy_model_parallel()
    dist.destroy_process_group()


def time_calls(case: Case, group: Group) -> float:
    """Mean seconds of one call, after one that brings everything back to this transport."""
    numel = max(group.size, case.nbytes // 4)
    tensor = torch.ones(numel // group.size * group.size if case.operation in PARTED else max(1, case.nbytes // 4))
    call = functools.partial(OPERATIONS[case.operation], tensor, group)
    call()
    nxd_state.barrier(group)
    start = time.perf_counter()
    for _ in range(case.calls):
        call()
    return (time.perf_counter() - start) / case.calls


def send_and_answer(tensor: Tensor, group: Group) -> None:
    """From even ranks to the next and back."""
    peer = group.rank ^ 1
    if peer < group.size and group.rank < peer:
        nxd_state.send(tensor, group, destination=peer)
        nxd_state.recv(tensor, group, source=peer)
    elif peer < group.size:
        nxd_state.recv(tensor, group, source=peer)
        nxd_state.send(tensor, group, destination=peer)


PARTED = ("reduce_scatter", "all_to_all")
OPERATIONS: dict[str, Callable[[Tensor, Group], object]] = {
    "all_reduce": nxd_state.all_reduce,
    "all_gather": nxd_state.all_gather,
    "reduce_scatter": nxd_state.reduce_scatter,
    "all_to_all": lambda tensor, group: nxd_state.all_to_all(tensor, group, split_dim=0, concat_dim=0),
    "broadcast": nxd_state.broadcast,
    "send and answer": send_and_answer,
    "barrier": lambda tensor, group: nxd_state.barrier(group),
}

if __name__ == "__main__":
    sys.exit(main())
