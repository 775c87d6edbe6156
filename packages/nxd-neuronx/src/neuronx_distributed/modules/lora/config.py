"""`neuronx_distributed.modules.lora.config`: from nxd_layers."""

from nxd_layers.lora import LoraConfig

__all__ = ["LoraConfig"]
