"""`neuronx_distributed.modules.lora.model`: models with adapters, over nxd_layers."""

from nxd_neuronx.lora import CONFIG_NAME, MODELS_TO_LORA_TARGET_MODULES_MAPPING, WEIGHTS_NAME, LoraModel

__all__ = ["LoraModel", "CONFIG_NAME", "MODELS_TO_LORA_TARGET_MODULES_MAPPING", "WEIGHTS_NAME"]
