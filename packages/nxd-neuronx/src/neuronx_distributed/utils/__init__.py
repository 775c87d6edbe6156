"""`neuronx_distributed.utils`: what scripts import beside the documented API, from nxd_neuronx.

Submodules, of which some bring in all of the trainer, are imported when they are first used.
"""

import importlib
from typing import Any

from nxd_neuronx.platform import HloMetadataLevel, hardware
from nxd_neuronx.process import cpu_mode, mark_step, master_print
from nxd_state import get_device

_SUBMODULES = (
    "activation_checkpoint",
    "adamw_fp32_optim_params",
    "batch_utils",
    "logger",
    "medusa_utils",
    "model_utils",
    "random",
    "safetensors_utils",
    "sampling",
    "serialization",
    "tensor_capture",
    "tensor_replacement",
    "tensor_utils",
    "utils",
)

__all__ = [
    "HloMetadataLevel",
    "cpu_mode",
    "get_device",
    "hardware",
    "mark_step",
    "master_print",
    "activation_checkpoint",
    "adamw_fp32_optim_params",
    "batch_utils",
    "logger",
    "medusa_utils",
    "model_utils",
    "random",
    "safetensors_utils",
    "sampling",
    "serialization",
    "tensor_capture",
    "tensor_replacement",
    "tensor_utils",
    "utils",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(__all__)}")
