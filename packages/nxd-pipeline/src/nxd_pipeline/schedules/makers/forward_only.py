"""Schedules without a backward, for evaluation: as they stand, or with the stages of a training schedule."""

from dataclasses import replace

from nxd_pipeline.schedules.action import ActionKind
from nxd_pipeline.schedules.makers.interleaved import interleaved_one_forward_one_backward
from nxd_pipeline.schedules.schedule import Schedule


def inference(pipeline_size: int, num_microbatches: int, *, virtual_pipeline_size: int = 1) -> Schedule:
    """The forwards of all microbatches, with stage s on rank s % pipeline_size; no rank keeps activations."""
    training = interleaved_one_forward_one_backward(
        pipeline_size, num_microbatches, virtual_pipeline_size=virtual_pipeline_size
    )
    return replace(forward_only(training), name="inference")


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a training schedule, in its order and on its ranks: what evaluates a model that it trains.

    Messages are left out; `insert_communication` adds them.
    """
    return replace(
        schedule,
        name=f"{schedule.name}, forward only",
        actions=tuple(
            tuple(action for action in actions if action.kind is ActionKind.FORWARD) for actions in schedule.actions
        ),
    )
