"""`neuronx_distributed.utils.tensor_capture`: capture of intermediate tensors, from nxd_neuronx."""

from nxd_neuronx.intermediates import (
    disable_tensor_capture,
    enable_tensor_capture,
    get_available_modules,
    get_captured_tensors_dict,
    register_tensor,
)

__all__ = [
    "disable_tensor_capture",
    "enable_tensor_capture",
    "get_available_modules",
    "get_captured_tensors_dict",
    "register_tensor",
]
