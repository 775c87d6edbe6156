"""`neuronx_distributed.utils.tensor_capture.registry`: the captured tensors, from nxd_neuronx."""

from nxd_neuronx.intermediates import CapturedModelInfo, TensorRegistry

__all__ = ["CapturedModelInfo", "TensorRegistry"]
