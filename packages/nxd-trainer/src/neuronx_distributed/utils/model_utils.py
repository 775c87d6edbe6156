"""`neuronx_distributed.utils.model_utils`: making and moving models, from nxd_state and nxd_trainer."""

from nxd_state import move_model_to_device
from nxd_trainer.script_helpers import get_local_world_size, init_on_device

__all__ = ["move_model_to_device", "init_on_device", "get_local_world_size"]
