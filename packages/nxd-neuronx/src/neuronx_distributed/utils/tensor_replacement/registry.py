"""`neuronx_distributed.utils.tensor_replacement.registry`: the replacement tensors, from nxd_neuronx."""

from nxd_neuronx.intermediates import RuntimeRegister

__all__ = ["RuntimeRegister"]
