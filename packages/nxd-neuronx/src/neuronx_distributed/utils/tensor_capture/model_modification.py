"""`neuronx_distributed.utils.tensor_capture.model_modification`: the hooks, from nxd_neuronx."""

from nxd_neuronx.intermediates import enable_tensor_capture as modify_model_for_tensor_capture
from nxd_neuronx.intermediates import get_available_modules as find_available_modules
from nxd_neuronx.intermediates import restore_model

__all__ = ["restore_model", "modify_model_for_tensor_capture", "find_available_modules"]
