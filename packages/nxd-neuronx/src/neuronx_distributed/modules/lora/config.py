"""`neuronx_distributed.modules.lora.config`: from nxd_layers."""

from nxd_lora import LoraConfig

__all__ = ["LoraConfig"]
