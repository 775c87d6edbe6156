"""`neuronx_distributed.modules.lora.layer`: single layers with adapters, over nxd_layers."""

from nxd_trainer.compat.lora import LoraEmbedding, LoraLayer, LoraLinear
from nxd_trainer.compat.not_here import not_here

(LoraConv2d,) = not_here(__name__, "conv", "LoraConv2d")

__all__ = ["LoraEmbedding", "LoraLayer", "LoraLinear", "LoraConv2d"]
