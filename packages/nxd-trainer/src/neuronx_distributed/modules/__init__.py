"""`neuronx_distributed.modules`: the attention projections and LoRA, from nxd_layers."""

from neuronx_distributed.modules import lora, qkv_linear, rms_norm

__all__ = ["lora", "qkv_linear", "rms_norm"]
