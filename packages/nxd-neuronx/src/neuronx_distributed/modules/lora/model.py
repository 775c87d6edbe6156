"""`neuronx_distributed.modules.lora.model`: models with adapters, over nxd_layers."""

from nxd_neuronx.lora import LoraModel

__all__ = ["LoraModel"]
