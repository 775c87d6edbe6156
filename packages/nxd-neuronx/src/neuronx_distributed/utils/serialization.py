"""`neuronx_distributed.utils.serialization`: nested values and their tensors, from nxd_neuronx."""

from nxd_neuronx.serialization import (
    SerializationManager,
    TensorMeta,
    compress_to_string,
    find_loss_from_output_and_spec,
    is_instance_namedtuple,
    uncompress_from_string,
)

__all__ = [
    "SerializationManager",
    "TensorMeta",
    "compress_to_string",
    "find_loss_from_output_and_spec",
    "is_instance_namedtuple",
    "uncompress_from_string",
]
