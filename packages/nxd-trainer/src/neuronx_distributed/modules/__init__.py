"""`neuronx_distributed.modules`: the attention projections and LoRA, from nxd_layers."""

from neuronx_distributed.modules import attention, lora, qkv_linear, qkv_linear_utils, rms_norm

__all__ = ["attention", "lora", "qkv_linear", "qkv_linear_utils", "rms_norm"]
