"""`neuronx_distributed.trace.nxd_model.nxd_model`: compiled models, over nxd_trace."""

from typing import Any

from nxd_neuronx.not_here import not_here
from nxd_neuronx.traced_model import NxDModel

InputTensorType = Any
(JITWrapper, TorchScriptNxDModel, convert_nxd_model_to_torchscript_model) = not_here(
    __name__, "hlo", "JITWrapper", "TorchScriptNxDModel", "convert_nxd_model_to_torchscript_model"
)

__all__ = [
    "Any",
    "NxDModel",
    "JITWrapper",
    "TorchScriptNxDModel",
    "convert_nxd_model_to_torchscript_model",
    "InputTensorType",
]
