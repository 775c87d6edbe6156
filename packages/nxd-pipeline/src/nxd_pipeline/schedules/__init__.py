"""Pipeline schedules as data: lists of actions, made, checked, timed, drawn, read and written without any rank."""

from nxd_pipeline.schedules.catalog import (
    SCHEDULE_NAMES,
    TRAINING_SCHEDULES,
    TrainingSchedule,
    choose_schedule,
    default_stages_per_rank,
    forward_only,
    make_schedule,
    stages_per_rank,
)
from nxd_pipeline.schedules.communication import insert_blocking_communication, insert_communication
from nxd_pipeline.schedules.edge import Dataflow, Edge, chain
from nxd_pipeline.schedules.schedule import (
    COMMUNICATION,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    custom_schedule,
    format_schedule,
    parse_action,
    parse_schedule,
    read_schedule,
    write_schedule,
)
from nxd_pipeline.schedules.simulation import Costs, Span, StageCost, Timeline, save_chart, simulate, text_chart
from nxd_pipeline.schedules.verification import ActivationSize, activations_kept, peak_in_flight, verify_schedule

__all__ = [
    "Action",
    "ActionKind",
    "SENDS",
    "RECEIVES",
    "COMMUNICATION",
    "parse_action",
    "Schedule",
    "custom_schedule",
    "Edge",
    "chain",
    "Dataflow",
    "SCHEDULE_NAMES",
    "TRAINING_SCHEDULES",
    "TrainingSchedule",
    "stages_per_rank",
    "default_stages_per_rank",
    "make_schedule",
    "choose_schedule",
    "forward_only",
    "insert_communication",
    "insert_blocking_communication",
    "verify_schedule",
    "peak_in_flight",
    "activations_kept",
    "ActivationSize",
    "simulate",
    "Costs",
    "StageCost",
    "Timeline",
    "Span",
    "read_schedule",
    "write_schedule",
    "parse_schedule",
    "format_schedule",
    "text_chart",
    "save_chart",
]
