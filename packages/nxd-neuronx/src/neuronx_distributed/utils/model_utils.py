"""`neuronx_distributed.utils.model_utils`: making and moving models, from nxd_state and nxd_neuronx."""

from nxd_neuronx.models import check_delay_tracing, get_delay_tracing, init_on_device
from nxd_neuronx.platform import LogicalNCConfig, get_platform_lnc
from nxd_neuronx.process import get_local_world_size
from nxd_state import move_model_to_device

__all__ = [
    "move_model_to_device",
    "check_delay_tracing",
    "get_delay_tracing",
    "LogicalNCConfig",
    "get_platform_lnc",
    "get_local_world_size",
    "init_on_device",
]
