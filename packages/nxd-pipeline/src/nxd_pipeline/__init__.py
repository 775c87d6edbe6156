"""Pipeline parallelism: models cut into stages, and schedules as data that are verified before any rank runs them."""

from nxd_pipeline.model import NxDPPModel
from nxd_pipeline.partition import OLD_RUNTIME_FLAGS, Stage, layer_flops, manual_partition
from nxd_pipeline.runtime import GradientSync, Microbatches, current_microbatch
from nxd_pipeline.schedules import (
    SCHEDULE_NAMES,
    TRAINING_SCHEDULES,
    Action,
    ActionKind,
    Costs,
    Edge,
    Schedule,
    StageCost,
    Timeline,
    TrainingSchedule,
    custom_schedule,
    default_stages_per_rank,
    insert_blocking_communication,
    insert_communication,
    make_schedule,
    read_schedule,
    simulate,
    stages_per_rank,
    verify_schedule,
    write_schedule,
)
from nxd_pipeline.timeline import BubbleReport, bubble_report, read_trace

__version__ = "0.1.0"

__all__ = [
    "NxDPPModel",
    "OLD_RUNTIME_FLAGS",
    "GradientSync",
    "current_microbatch",
    "Microbatches",
    "Stage",
    "manual_partition",
    "layer_flops",
    "SCHEDULE_NAMES",
    "TRAINING_SCHEDULES",
    "TrainingSchedule",
    "stages_per_rank",
    "default_stages_per_rank",
    "make_schedule",
    "custom_schedule",
    "Schedule",
    "Action",
    "ActionKind",
    "Edge",
    "insert_communication",
    "insert_blocking_communication",
    "verify_schedule",
    "simulate",
    "Costs",
    "StageCost",
    "Timeline",
    "read_schedule",
    "write_schedule",
    "read_trace",
    "bubble_report",
    "BubbleReport",
]
