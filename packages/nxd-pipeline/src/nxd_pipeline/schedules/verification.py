"""Checks that a schedule can run: inputs exist, nothing is missing or done twice, and no rank waits forever.

No ranks are needed. Messages are matched in the strictest way, one after the other and each blocking at both ends: a
schedule that passes cannot deadlock on a transport that blocks less or that matches messages by their order. The order
of actions also determines how many activations each rank keeps at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from nxd_pipeline.schedules.edge import Dataflow, Edge, backwards
from nxd_pipeline.schedules.schedule import COMMUNICATION, MAKES_GRADIENT, Action, ActionKind, Schedule


@dataclass(frozen=True)
class ActivationSize:
    """The activations that one microbatch leaves on a stage, in bytes or any other unit.

    Attributes:
        until_backward: size kept from the forward until the backward, or the backward of inputs.
        until_weights: size kept from the backward of inputs until the backward of weights.
    """

    until_backward: int = 1
    until_weights: int = 1


def peak_in_flight(schedule: Schedule, sizes: Sequence[ActivationSize] | None = None) -> tuple[int, ...]:
    """Return the maximum that each rank keeps at any time; 0 if the schedule is forward only.

    Args:
        schedule: with or without messages.
        sizes: one size per stage; by default a microbatch counts 1 on each stage until all its gradients are computed.

    Raises:
        ValueError: there is another number of sizes than stages.
    """
    return tuple(max(kept, default=0) for kept in activations_kept(schedule, sizes))


def activations_kept(schedule: Schedule, sizes: Sequence[ActivationSize] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the activations that each rank keeps after each of its actions; see `peak_in_flight`."""
    if sizes is None:
        sizes = (ActivationSize(),) * schedule.num_stages
    if len(sizes) != schedule.num_stages:
        raise ValueError(f"{len(sizes)} sizes for a schedule of {schedule.num_stages} stages; pass one for each stage")
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


def verify_schedule(
    schedule: Schedule, edges: Iterable[Edge] | None = None, *, max_in_flight: int | Sequence[int] | None = None
) -> tuple[int, ...]:
    """Check a schedule with its messages.

    Args:
        schedule: the schedule, with messages; `insert_communication` adds them.
        edges: edges between stages; by default each stage uses the output of the previous one.
        max_in_flight: maximum number of activations of any rank, or of each rank, as counted by `peak_in_flight`.

    Returns:
        The maximum number of activations on each rank.

    Raises:
        ValueError: the schedule cannot be executed or keeps too much; the message names rank, position and action.
    """
    dataflow = Dataflow(schedule, edges)
    if dataflow.crosses_ranks and not schedule.has_communication:
        raise ValueError(f"schedule {schedule.name!r} has no messages; insert_communication(schedule) adds them")
    for rank in range(schedule.num_ranks):
        _check_rank(schedule, dataflow, rank)
    _match_messages(schedule)
    kept = activations_kept(schedule)
    if max_in_flight is not None:
        _check_memory(schedule, kept, max_in_flight)
    return tuple(map(max, kept))


def _check_rank(schedule: Schedule, dataflow: Dataflow, rank: int) -> None:
    """Check that every action of a rank has its inputs, and occurs exactly once."""
    done: dict[Action, int] = {}
    for position, action in enumerate(schedule.actions[rank]):
        problem = _why_not(dataflow, action, done)
        if problem:
            raise ValueError(f"{schedule.where(rank, position)}: {problem}")
        done[action] = position
    for missing in _missing(schedule, dataflow, rank, done):
        raise ValueError(f"schedule {schedule.name!r}, rank {rank}: {missing} is missing")


def _why_not(dataflow: Dataflow, action: Action, done: dict[Action, int]) -> str | None:
    """Return the reason why an action cannot follow the actions done; None if it can."""
    if action.is_communication and not dataflow.carries(action):
        return "no such message is needed: these stages share no such edge, or one rank"
    rivals = backwards(action.stage, action.microbatch) if action.kind in MAKES_GRADIENT else (action,)
    for rival in rivals:
        if rival in done:
            return f"{rival} is at position {done[rival]} already; leave one of them out"
    for choice in (*dataflow.local_inputs(action), *((it,) for it in dataflow.receives(action))):
        if not any(needed in done for needed in choice):
            return f"{' or '.join(map(str, choice))} has to come before it"
    return None


def _missing(schedule: Schedule, dataflow: Dataflow, rank: int, done: dict[Action, int]) -> Iterator[str]:
    """Yield the actions that the rank's stages lack."""
    kinds: list[tuple[ActionKind, ...]] = [(ActionKind.FORWARD,)]
    if not schedule.is_forward_only:
        kinds += [(ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT), (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)]
    for stage, microbatch in product(schedule.stages_of(rank), range(schedule.num_microbatches)):
        for choice in kinds:
            alternatives = [Action(kind, stage, microbatch) for kind in choice]
            if not any(action in done for action in alternatives):
                yield " or ".join(map(str, alternatives))
    yield from (str(send) for action in done for send in dataflow.sends(action) if send not in done)


def _match_messages(schedule: Schedule) -> None:
    """Check that all messages meet if each one blocks both its ranks."""
    rows = [[(place, it) for place, it in enumerate(row) if it.is_communication] for row in schedule.actions]
    positions = [0] * schedule.num_ranks
    moving = list(range(schedule.num_ranks))
    while moving:
        rank = moving.pop()
        if positions[rank] == len(rows[rank]):
            continue
        counterpart = rows[rank][positions[rank]][1].counterpart()
        peer_rank = schedule.rank_of_stage[counterpart.stage]
        if positions[peer_rank] < len(rows[peer_rank]) and rows[peer_rank][positions[peer_rank]][1] == counterpart:
            positions[rank] += 1
            positions[peer_rank] += 1
            moving += [rank, peer_rank]
    stops = [
        schedule.where(rank, row[position][0])
        for rank, (row, position) in enumerate(zip(rows, positions, strict=True))
        if position < len(row)
    ]
    if stops:
        raise ValueError(
            f"ranks wait forever at these messages, because the other end has a different message first, or none: "
            f"{'; '.join(stops)}. Both ends need the same order; insert_communication(schedule) finds one"
        )


def _check_memory(schedule: Schedule, kept: Sequence[Sequence[int]], max_in_flight: int | Sequence[int]) -> None:
    bounds = [max_in_flight] * schedule.num_ranks if isinstance(max_in_flight, int) else max_in_flight
    if len(bounds) != schedule.num_ranks:
        raise ValueError(f"max_in_flight={max_in_flight} is for {len(bounds)} ranks; expected {schedule.num_ranks}")
    for rank, (numbers, bound) in enumerate(zip(kept, bounds, strict=True)):
        for position, number in enumerate(numbers):
            if number > bound:
                raise ValueError(
                    f"{schedule.where(rank, position)}: this rank keeps {number} activations here, at most "
                    f"{max(numbers)}, but max_in_flight={bound}"
                )
