"""Times of layers that take turns, so that what disturbs the machine disturbs them alike.

One process is timed by its CPU's clock, several by the one on the wall.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from nxd_state import active_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from layer_bench.cases import CASES

WARM_UP = 3


@dataclass(frozen=True)
class Comparison:
    """Seconds of each round, ours and the rival's; a round's time is that of its slowest rank."""

    ours: Sequence[float]
    rival: Sequence[float]

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios, ours by the rival's."""
        return median(ours / rival for ours, rival in zip(self.ours, self.rival, strict=True))


def compare(name: str, rounds: int) -> Comparison:
    """Our layer beside torch's, or on several ranks beside DTensor's. Called on all ranks."""
    case, tensor_parallel = CASES[name], active_group("tp").size
    torch.manual_seed(0)
    input_ = case.input(tensor_parallel)
    ours = case.ours()
    rival = case.plain() if tensor_parallel == 1 else case.dtensor(init_device_mesh("cpu", (tensor_parallel,)))
    times: dict[nn.Module, list[float]] = {ours: [], rival: []}
    for number in range(WARM_UP + rounds):
        for layer in (ours, rival) if number % 2 else (rival, ours):
            times[layer].append(_seconds(layer, input_))
    return Comparison(times[ours][WARM_UP:], times[rival][WARM_UP:])


def _seconds(layer: nn.Module, input_: Tensor) -> float:
    """Of one forward and backward, on the slowest rank."""
    layer.zero_grad()
    input_ = input_.clone().requires_grad_(input_.is_floating_point())
    # What else runs on the machine does not count for a process that waits for no other.
    clock = time.process_time if active_group("tp").size == 1 else time.perf_counter
    dist.barrier()
    start = clock()
    with getattr(layer, "context", nullcontext)():
        output = layer(input_)
        output = output.to_local() if isinstance(output, DTensor) and output.dim() else output
        output.backward(torch.ones_like(output))
    seconds = torch.tensor(clock() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()
