"""`neuronx_distributed.utils.safetensors_utils`: tensors that share memory, from nxd_neuronx."""

from nxd_neuronx.serialization import check_for_duplicate_tensors

__all__ = ["check_for_duplicate_tensors"]
