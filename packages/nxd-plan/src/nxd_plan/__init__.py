"""Plans a training job without its cluster: the layouts that fit, their memory and messages, and the step time.

The real mesh, layers, partition and schedules run in one process on meta tensors. Nothing is trained here.
"""

from nxd_plan.devices import DEVICES, Device, find_device
from nxd_plan.layout import FixedDegrees, Layout, Rejected, TrainingJob
from nxd_plan.memory import RankMemory
from nxd_plan.model import OwnLlama, PlannedModel
from nxd_plan.planner import Plan, PlannedLayout, TooLarge, make_plan
from nxd_plan.recipes import PlannedRecipe, changed_keys, read_recipe, recipe, save_changed, save_recipe, train_command
from nxd_plan.render import config_call
from nxd_plan.step_time import Communication, StepTime
from nxd_plan.transformers_model import TransformersModel, planned_model

__all__ = [
    # what is planned
    "TrainingJob",
    "FixedDegrees",
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
    "TooLarge",
    "Rejected",
    # running it
    "config_call",
    "recipe",
    "save_recipe",
    # planning a recipe
    "read_recipe",
    "PlannedRecipe",
    "changed_keys",
    "train_command",
    "save_changed",
]
