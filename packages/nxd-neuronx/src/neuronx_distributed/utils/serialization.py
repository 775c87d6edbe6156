"""`neuronx_distributed.utils.serialization`: nested values and their tensors, from nxd_neuronx."""

from nxd_neuronx.serialization import SerializationManager, TensorMeta, is_instance_namedtuple

__all__ = ["SerializationManager", "TensorMeta", "is_instance_namedtuple"]
