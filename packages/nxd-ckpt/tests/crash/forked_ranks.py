"""Ranks as forked processes that can be killed, and that hear at once when one of them is gone.

The parent hands the objects of a gather around. Nothing is waited for longer than the ranks themselves take.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch
from nxd_ckpt import CheckpointError

_fork = multiprocessing.get_context("fork")

TIMEOUT = 180.0  # seconds in which a rank says something


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: `signal` if it was killed, else `error`, which is "" if all went well, and what it returned."""

    signal: int = 0
    error: str = ""
    value: object = None


class PipeCoordinator:
    """A Coordinator whose gathers go through the parent process."""

    def __init__(self, rank: int, world_size: int, pipe: Connection) -> None:
        self.rank = rank
        self.world_size = world_size
        self._pipe = pipe

    def all_gather_object(self, value):
        self._pipe.send(("gather", value))
        values = self._pipe.recv()
        if isinstance(values, str):
            raise CheckpointError(values)
        return values


def run_forked(function: Callable[[PipeCoordinator], object], world_size: int) -> list[Outcome]:
    """Calls `function(coordinator)` in one process per rank and tells how each ended."""
    pipes, processes = [], []
    for rank in range(world_size):
        here, there = _fork.Pipe()
        process = _fork.Process(target=_child, args=(function, rank, world_size, there, [*pipes, here]))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    outcomes: dict[int, Outcome] = {}
    asked: dict[int, object] = {}
    while len(outcomes) < world_size:
        at_work = [rank for rank in range(world_size) if rank not in outcomes and rank not in asked]
        ready = wait([pipes[rank] for rank in at_work], TIMEOUT)
        if not ready:
            for process in processes:
                process.kill()
            raise TimeoutError(f"ranks {at_work} said nothing for {TIMEOUT} seconds")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                processes[rank].join()
                outcomes[rank] = Outcome(signal=-processes[rank].exitcode)
                continue
            if kind == "gather":
                asked[rank] = value
            else:
                outcomes[rank] = value
        if len(outcomes) + len(asked) == world_size and asked:
            gone = ", ".join(map(str, sorted(outcomes)))
            answer = f"rank {gone} of {world_size} is gone" if outcomes else [asked[rank] for rank in sorted(asked)]
            for rank in asked:
                pipes[rank].send(answer)
            asked = {}
    for process in processes:
        process.join()
    return [outcomes[rank] for rank in range(world_size)]


def _child(function, rank, world_size, pipe, others):
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)  # OpenMP's threads are not forked, and whoever hands them work waits for ever
    try:
        outcome = Outcome(value=function(PipeCoordinator(rank, world_size, pipe)))
    except Exception as error:
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
    pipe.send(("end", outcome))
    sys.stdout.flush()
    os._exit(0)
