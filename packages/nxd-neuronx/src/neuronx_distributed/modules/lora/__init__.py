"""`neuronx_distributed.modules.lora`: LoRA from nxd_layers."""

from nxd_lora import LoraConfig, LoRAModel
from nxd_neuronx.lora import LoraModel, get_lora_model

from neuronx_distributed.modules.lora import config, layer, model, tp_layer

__all__ = ["LoraConfig", "LoraModel", "LoRAModel", "get_lora_model", "config", "layer", "model", "tp_layer"]
