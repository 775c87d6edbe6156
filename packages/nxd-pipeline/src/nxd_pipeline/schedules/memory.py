"""Counts the activations that each rank keeps at once, from the order of its actions alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nxd_pipeline.schedules.action import COMMUNICATION, ActionKind
from nxd_pipeline.schedules.schedule import Schedule


@dataclass(frozen=True)
class ActivationSize:
    """The activations that one microbatch leaves on a stage, in bytes or any other unit.

    Attributes:
        until_backward: kept from the forward until the backward, or the backward of inputs.
        until_weights: the part of it, and what comes with it, that is kept until the backward of weights.
    """

    until_backward: int = 1
    until_weights: int = 1


def peak_in_flight(schedule: Schedule, sizes: Sequence[ActivationSize] | None = None) -> tuple[int, ...]:
    """The most that each rank keeps at any time; nothing where all is forward only.

    Args:
        schedule: with or without messages.
        sizes: one per stage; by default each microbatch on each stage counts 1 until all its gradients are made.

    Raises:
        ValueError: `sizes` are of another number of stages.
    """
    return tuple(max(kept, default=0) for kept in activations_kept(schedule, sizes))


def activations_kept(schedule: Schedule, sizes: Sequence[ActivationSize] | None = None) -> tuple[tuple[int, ...], ...]:
    """The activations that each rank keeps after each of its actions; see `peak_in_flight`."""
    if sizes is None:
        sizes = (ActivationSize(),) * schedule.num_stages
    if len(sizes) != schedule.num_stages:
        raise ValueError(f"{len(sizes)} sizes for a schedule of {schedule.num_stages} stages; give one for each stage")
    if schedule.is_forward_only:
        return tuple((0,) * len(actions) for actions in schedule.actions)
    change = {
        ActionKind.FORWARD: tuple(size.until_backward for size in sizes),
        ActionKind.BACKWARD: tuple(-size.until_backward for size in sizes),
        ActionKind.BACKWARD_INPUT: tuple(size.until_weights - size.until_backward for size in sizes),
        ActionKind.BACKWARD_WEIGHT: tuple(-size.until_weights for size in sizes),
        **dict.fromkeys(COMMUNICATION, (0,) * len(sizes)),
    }
    return tuple(tuple(accumulate(change[it.kind][it.stage] for it in actions)) for actions in schedule.actions)
