"""`neuronx_distributed.utils.tensor_replacement`: replacement of intermediate tensors, from nxd_neuronx."""

from nxd_neuronx.intermediates import modify_model_for_tensor_replacement, patch_forward_with_additional_args

__all__ = ["modify_model_for_tensor_replacement", "patch_forward_with_additional_args"]
