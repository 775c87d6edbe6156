"""What the times of a benchmark depend on besides the code."""

import os

import torch

_BUSY = 0.5  # processes that run or wait, on average


def print_surroundings(rounds: int) -> None:
    """Say what is measured on, and warn where something else runs there."""
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {rounds} rounds")
    load = os.getloadavg()[0]
    if load > _BUSY:
        print(f"The load of this machine is {load:.1f}: what else runs here disturbs the times below.")
