"""Pipeline schedules as data: lists of actions, made, checked, timed, drawn, read and written without any rank."""

from nxd_pipeline.schedules.catalog import (
    SCHEDULE_NAMES,
    TRAINING_SCHEDULES,
    TrainingSchedule,
    choose_schedule,
    default_stages_per_rank,
    dualpipe_v,
    forward_only,
    gpipe,
    inference,
    interleaved_one_forward_one_backward,
    looped_placement,
    make_schedule,
    one_forward_one_backward,
    stages_per_rank,
    v_placement,
    zero_bubble_h1,
    zero_bubble_v,
)
from nxd_pipeline.schedules.chart import save_chart, text_chart
from nxd_pipeline.schedules.communication import insert_blocking_communication, insert_communication
from nxd_pipeline.schedules.edge import Dataflow, Edge, chain
from nxd_pipeline.schedules.schedule import (
    COMMUNICATION,
    MAKES_GRADIENT,
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
from nxd_pipeline.schedules.simulation import Costs, Span, StageCost, Timeline, simulate
from nxd_pipeline.schedules.verification import ActivationSize, activations_kept, peak_in_flight, verify_schedule

__all__ = [
    # what a schedule is
    "Action",
    "ActionKind",
    "SENDS",
    "RECEIVES",
    "COMMUNICATION",
    "MAKES_GRADIENT",
    "parse_action",
    "Schedule",
    "custom_schedule",
    "Edge",
    "chain",
    "Dataflow",
    # making one
    "SCHEDULE_NAMES",
    "TRAINING_SCHEDULES",
    "TrainingSchedule",
    "stages_per_rank",
    "default_stages_per_rank",
    "make_schedule",
    "choose_schedule",
    "gpipe",
    "one_forward_one_backward",
    "interleaved_one_forward_one_backward",
    "zero_bubble_h1",
    "zero_bubble_v",
    "dualpipe_v",
    "inference",
    "forward_only",
    "looped_placement",
    "v_placement",
    "insert_communication",
    "insert_blocking_communication",
    # checking and measuring it
    "verify_schedule",
    "peak_in_flight",
    "activations_kept",
    "ActivationSize",
    "simulate",
    "Costs",
    "StageCost",
    "Timeline",
    "Span",
    # reading, writing, drawing it
    "read_schedule",
    "write_schedule",
    "parse_schedule",
    "format_schedule",
    "text_chart",
    "save_chart",
]
