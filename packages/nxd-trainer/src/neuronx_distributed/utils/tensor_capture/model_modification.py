"""`neuronx_distributed.utils.tensor_capture.model_modification`: the hooks, from nxd_trainer."""

from nxd_trainer.compat.intermediates import disable_tensor_capture as restore_model
from nxd_trainer.compat.intermediates import enable_tensor_capture as modify_model_for_tensor_capture
from nxd_trainer.compat.intermediates import get_available_modules as find_available_modules

__all__ = ["restore_model", "modify_model_for_tensor_capture", "find_available_modules"]
