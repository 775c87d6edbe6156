"""Counts what a rank sends to its replicas in a step: gradients and, where ZeRO shards, parameters.

It follows nxd_optim: ZeRO-1 sends whole gradients once in a step, ZeRO-2 and ZeRO-3 after each backward; ZeRO-3 gathers
units before they are used, as often as they have been released since.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from nxd_pipeline import ActionKind, Schedule, make_schedule

from nxd_plan.layout import Layout
from nxd_plan.memory import FLOAT32_BYTES
from nxd_plan.stages import StageParts


@dataclass(frozen=True)
class ReplicaTraffic:
    """What a rank sends to its replicas in a step.

    Attributes:
        sharing: bytes to the ranks with which it shares states: all replicas, or those of its group.
        mirrors: bytes to the ranks that have the same part of the states, with hybrid sharding.
        near: bytes to the near ranks of `reshard_after_forward`.
        messages: number of collectives, where a unit's is one; 1 without ZeRO-3, whose buckets follow one another.
        ahead: bytes of `sharing` that gather units while the units before them compute.
        ahead_messages: number of the `messages` that gather such units, also from near ranks.
    """

    sharing: int = 0
    mirrors: int = 0
    near: int = 0
    messages: int = 0
    ahead: int = 0
    ahead_messages: int = 0


@dataclass(frozen=True)
class _Gathers:
    """How often the parameters of a stage are gathered in a step.

    Attributes:
        outside: those outside the units.
        last: those of the last unit.
        others: those of every other unit.
        near: those of every other unit, from near ranks.
    """

    outside: int = 0
    last: int = 0
    others: int = 0
    near: int = 0

    def extrapolated(self, earlier: "_Gathers", rounds: int, more: int) -> "_Gathers":
        """Return the numbers with `more` microbatches, of which `rounds` add what this has beside `earlier`."""
        here, before = vars(self), vars(earlier)
        return _Gathers(**{name: here[name] + (here[name] - before[name]) * more // rounds for name in here})


def replica_traffic(
    layout: Layout, stages: Sequence[StageParts], own: Sequence[int], schedule_name: str, itemsize: int
) -> ReplicaTraffic:
    """Return what a pipeline rank sends to its replicas in a step.

    Args:
        layout: the layout.
        stages: all stages of the pipeline.
        own: the indices of this rank's stages.
        schedule_name: the pipeline's schedule.
        itemsize: bytes per element of the weights.
    """
    total = ReplicaTraffic()
    for is_expert in (False, True):
        for index in own:
            found = _of_stage(layout, stages[index], is_expert, index, schedule_name, itemsize)
            total = replace(total, **{name: value + vars(found)[name] for name, value in vars(total).items()})
    return total if layout.degrees.zero_stage == 3 else replace(total, messages=int(total.sharing + total.mirrors > 0))


def _of_stage(
    layout: Layout, stage: StageParts, is_expert: bool, index: int, schedule_name: str, itemsize: int
) -> ReplicaTraffic:
    degrees, parts = layout.degrees, layout.sharing_ranks[is_expert]
    replicas = degrees.expert_replicas if is_expert else degrees.replicas
    elements = stage.experts if is_expert else stage.elements - stage.experts - stage.frozen
    if not degrees.zero_stage:
        return ReplicaTraffic(2 * elements * itemsize * (replicas - 1) // replicas)
    wide = max(itemsize, FLOAT32_BYTES)
    # Gradients of tied weights are complete when all stages are done.
    tied = sum(it.elements for it in stage.parameters if it.is_tied and it.is_expert == is_expert)
    rounds = layout.num_microbatches if degrees.zero_stage >= 2 else 1
    gradients = ((elements - tied) * rounds + tied) * wide * (parts - 1) // parts
    own, mirrors = elements * wide // parts, replicas // parts
    averaged = 2 * own * (mirrors - 1) // mirrors
    if degrees.zero_stage < 3:
        return ReplicaTraffic(gradients + elements * itemsize * (parts - 1) // parts, averaged)
    units = [0] * (len(stage.layers) + 2)
    for it in stage.parameters:
        units[it.place] += it.elements * itemsize * (it.is_expert == is_expert)
    outside, others, last = units[0] + units[-1], sum(units[1:-2]), sum(units[1:-1][-1:])
    gathers = _gathers(layout, index, schedule_name)
    ahead = (others * gathers.others + last * gathers.last) * (parts - 1) // parts
    near = 1 if isinstance(layout.reshard_after_forward, bool) else layout.reshard_after_forward
    number = max(0, len(stage.layers) - 1)
    ahead_messages = (gathers.last + number * (gathers.others + gathers.near)) * bool(others + last)
    return ReplicaTraffic(
        sharing=gradients + outside * gathers.outside * (parts - 1) // parts + ahead,
        mirrors=averaged,
        near=others * gathers.near * (near - 1) // near,
        messages=(gathers.outside + rounds * (number + 2)) * bool(outside + others + last) + ahead_messages,
        ahead=ahead,
        ahead_messages=ahead_messages,
    )


def _gathers(layout: Layout, stage: int, schedule_name: str) -> _Gathers:
    ranks, number = layout.degrees.pp, layout.num_microbatches
    reshard = layout.reshard_after_forward
    is_near = not isinstance(reshard, bool) and reshard != layout.sharing_ranks[0]
    if reshard is False:
        return _Gathers(1, 1, 1)
    kept = layout.checkpointing != "none"  # recomputes, so that a backward cannot be split
    longest = 3 * ranks
    found = _counted(schedule_name, ranks, min(number, longest), stage, is_near, kept)
    if number <= longest:
        return found
    earlier = _counted(schedule_name, ranks, 2 * ranks, stage, is_near, kept)
    return found.extrapolated(earlier, ranks, number - longest)


@cache
def _counted(name: str, ranks: int, microbatches: int, stage: int, is_near: bool, recomputes: bool) -> _Gathers:
    """Follow a step's actions on a stage."""
    schedule: Schedule = make_schedule(name, ranks, microbatches)
    found = dict.fromkeys(("outside", "last", "others", "near"), 0)
    whole = dict.fromkeys(("outside", "last", "others"), False)
    is_kept_near = False

    def gather(*units: str) -> None:
        nonlocal is_kept_near
        for unit in units:
            if unit == "others" and is_kept_near:
                found["near"] += 1
            elif not whole[unit]:
                found[unit] += 1
        if "others" in units:
            is_kept_near = False

    for action in schedule.actions[schedule.rank_of_stage[stage]]:
        if action.stage != stage:
            continue
        if action.kind is ActionKind.FORWARD:
            gather("outside", "others", "last")
            whole.update(outside=True, last=True)
            is_kept_near = is_near
        elif action.kind is ActionKind.BACKWARD or (action.kind is ActionKind.BACKWARD_INPUT and stage > 0):
            gather("outside", "others", "last")
            whole.update(outside=False, last=False)
        elif action.kind is ActionKind.BACKWARD_WEIGHT and (stage == 0 or not recomputes):
            gather("outside", "others", "last")
    return _Gathers(**found)
