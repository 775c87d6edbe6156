"""`neuronx_distributed.trace.nxd_model.nxd_model`: compiled models, over nxd_trace."""

from typing import Any

from nxd_neuronx.traced_model import NxDModel

InputTensorType = Any

__all__ = ["Any", "NxDModel", "InputTensorType"]
