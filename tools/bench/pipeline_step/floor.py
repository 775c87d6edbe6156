"""The time below which a schedule cannot come: what its stages take without messages, put together by the simulator."""

from collections.abc import Callable
from time import perf_counter

import torch.distributed as dist
from nxd_pipeline import Costs, StageCost, insert_communication, make_schedule, simulate
from torch import nn

from pipeline_step.model import Size, WholeModel, chunks, mean_squared_error
from pipeline_step.variants import RANKS

Alone = Callable[[], tuple[float, float]]


def build_alone(size: Size, num_microbatches: int) -> Alone:
    """A function that computes this rank's half of the layers, on all ranks at once and without messages.

    It gives the seconds of a microbatch's forward and of its backward, means over the microbatches.
    """
    rank = dist.get_rank()
    stage: nn.Module = chunks(list(WholeModel(size.stack()).layers), RANKS)[rank]
    hidden, target = (part.chunk(num_microbatches) for part in size.batch_of_hidden())

    def alone() -> tuple[float, float]:
        forward = backward = 0.0
        dist.barrier()
        for part, wanted in zip(hidden, target, strict=True):
            input_ = part.detach().requires_grad_(rank > 0)
            start = perf_counter()
            output = stage(input_)
            result = mean_squared_error(output, wanted) / num_microbatches if rank == RANKS - 1 else output
            middle = perf_counter()
            result.backward(None if rank == RANKS - 1 else wanted)
            forward += middle - start
            backward += perf_counter() - middle
        return forward / num_microbatches, backward / num_microbatches

    return alone


def one_forward_one_backward_floor(of_ranks: list[tuple[float, float]], num_microbatches: int) -> float:
    """Seconds of a 1F1B step of these stages if messages took no time: the slowest stage's compute, and the ramp."""
    schedule = insert_communication(make_schedule("1f1b", RANKS, num_microbatches))
    costs = tuple(StageCost(forward=forward, backward=backward) for forward, backward in of_ranks)
    return simulate(schedule, Costs(costs)).makespan
