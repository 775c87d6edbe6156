"""`neuronx_distributed.utils.model_utils`: building and moving models, from nxd_state and nxd_neuronx."""

from nxd_neuronx.planned_ranks import init_on_device
from nxd_neuronx.process import LogicalNCConfig, get_local_world_size, get_platform_lnc
from nxd_state import move_model_to_device

__all__ = ["move_model_to_device", "LogicalNCConfig", "get_platform_lnc", "get_local_world_size", "init_on_device"]
