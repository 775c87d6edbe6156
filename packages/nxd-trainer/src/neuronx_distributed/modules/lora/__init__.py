"""`neuronx_distributed.modules.lora`: LoRA from nxd_layers."""

from nxd_layers.lora import LoraConfig, LoRAModel, LoraModel

__all__ = ["LoraConfig", "LoraModel", "LoRAModel"]
