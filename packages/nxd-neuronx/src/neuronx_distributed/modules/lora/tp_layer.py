"""`neuronx_distributed.modules.lora.tp_layer`: parallel layers with adapters, over nxd_layers."""

from nxd_neuronx.lora import LoraGQAQKVParallelLinear, LoraParallelLinear

__all__ = ["LoraGQAQKVParallelLinear", "LoraParallelLinear"]
