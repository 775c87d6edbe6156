"""`neuronx_distributed.modules`: the attention projections, LoRA and mixture-of-experts layers, from nxd_layers."""

from neuronx_distributed.modules import attention, lora, moe, qkv_linear, rms_norm

__all__ = ["attention", "lora", "moe", "qkv_linear", "rms_norm"]
