"""Measures of the running process: how many tokens it gets through, and how much memory it has needed."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch


class Throughput:
    """Counts tokens against the time spent on training steps; what else a loop does is excluded.

    Example:
        throughput = Throughput()
        ...
        throughput.add(tokens_of_the_step)
        with throughput.paused():
            evaluate()
        tokens_per_second = throughput.lap()
    """

    def __init__(self) -> None:
        self._began = perf_counter()
        self._lap_began = self._began
        self._lap_tokens = 0

    @property
    def seconds(self) -> float:
        """Seconds since this object was made, pauses included."""
        return perf_counter() - self._began

    def add(self, tokens: int) -> None:
        """Count the tokens of a step, over all ranks."""
        self._lap_tokens += tokens

    def lap(self) -> float:
        """Tokens per second since the lap before, pauses excluded; begins a new lap."""
        now = perf_counter()
        tokens_per_second = self._lap_tokens / max(now - self._lap_began, 1e-9)
        self._lap_began, self._lap_tokens = now, 0
        return tokens_per_second

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent within, such as an evaluation or the writing of a checkpoint."""
        began = perf_counter()
        try:
            yield
        finally:
            self._lap_began += perf_counter() - began


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: on a CUDA device its own, elsewhere this process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB, macOS in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
