"""Planning a training job without its cluster: the layouts that fit, their memory and messages, and the time of a step.

The real mesh, layers, partition and schedules run in one process, on tensors without memory. Nothing is trained here.
"""

from nxd_trainer.plan.devices import DEVICES, Device, find_device
from nxd_trainer.plan.layout import Degrees, Job, Layout, Rejected
from nxd_trainer.plan.memory import RankMemory
from nxd_trainer.plan.model import OwnLlama, PlannedModel
from nxd_trainer.plan.model_file import planned_model
from nxd_trainer.plan.planner import Misfit, Plan, PlannedLayout, make_plan
from nxd_trainer.plan.ready_config import config_call, recipe
from nxd_trainer.plan.step_time import Communication, StepTime
from nxd_trainer.plan.transformers_model import TransformersModel

__all__ = [
    # what is planned
    "Job",
    "Degrees",
    "PlannedModel",
    "OwnLlama",
    "TransformersModel",
    "planned_model",
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
