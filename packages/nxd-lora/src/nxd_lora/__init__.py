"""Low-rank adapters (LoRA) on plain and parallel layers: training, merging, saving, Hugging Face PEFT's file format."""

from nxd_lora.adapter_config import (
    adapter_config,
    check_same_scale,
    check_tensors,
    config_from_adapter_config,
)
from nxd_lora.config import LoraConfig
from nxd_lora.model import LoraModel, adapters_off
from nxd_lora.peft_files import (
    load_peft_adapter,
    name_from_peft,
    peft_form,
    read_peft_config,
    save_peft_adapter,
    write_adapter_config,
    write_peft_files,
)
from nxd_lora.state import adapter_names, gather_adapter, load_adapter
from nxd_lora.targets import ALL_LINEAR, TargetLayers, find_target_layers

__version__ = "0.1.0"

LoRAModel = LoraModel  # the documents' spelling

__all__ = [
    "LoraConfig",
    "LoraModel",
    "LoRAModel",
    "adapters_off",
    # which layers are adapted
    "find_target_layers",
    "ALL_LINEAR",
    "TargetLayers",
    # the adapter as whole tensors, and its description
    "adapter_names",
    "gather_adapter",
    "load_adapter",
    "adapter_config",
    "config_from_adapter_config",
    "check_same_scale",
    "check_tensors",
    # Hugging Face PEFT's files
    "save_peft_adapter",
    "write_peft_files",
    "load_peft_adapter",
    "read_peft_config",
    "write_adapter_config",
    "name_from_peft",
    "peft_form",
]
