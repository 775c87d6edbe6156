"""Planning a training job without its cluster: which layouts fit, what they hold and send, how long a step takes.

The real mesh, layers, partition and schedules run in one process, on tensors without memory. Nothing is trained here.
"""

from nxd_trainer.plan.devices import DEVICES, Device, find_device
from nxd_trainer.plan.layout import Degrees, Job, Layout, Rejected, model_config
from nxd_trainer.plan.memory import RankMemory
from nxd_trainer.plan.planner import Misfit, Plan, PlannedLayout, make_plan
from nxd_trainer.plan.ready_config import config_call, recipe
from nxd_trainer.plan.step_time import Communication, StepTime

__all__ = [
    # what is planned
    "Job",
    "Degrees",
    "model_config",
    "Device",
    "DEVICES",
    "find_device",
    # the plan
    "make_plan",
    "Plan",
    "PlannedLayout",
    "Layout",
    "RankMemory",
    "Communication",
    "StepTime",
    "Misfit",
    "Rejected",
    # running it
    "config_call",
    "recipe",
]
