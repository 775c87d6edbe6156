"""`neuronx_distributed.modules.lora.layer`: single layers with adapters, over nxd_layers."""

from nxd_neuronx.lora import LoraConv2d, LoraEmbedding, LoraLayer, LoraLinear

__all__ = ["LoraConv2d", "LoraEmbedding", "LoraLayer", "LoraLinear"]
