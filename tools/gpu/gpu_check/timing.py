"""Seconds of a function on a device, by CUDA's events; on the CPU by the clock."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

ROUNDS = 7


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """The median of several calls, after two to warm up."""
    return in_turns({"": run}, device)[""]


def in_turns(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """The median seconds of each of several functions, after two calls each to warm up.

    They take turns, so that all meet the same machine.
    """
    for run in runs.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(_seconds(run, device))
    return {name: median(seconds) for name, seconds in times.items()}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
