"""`neuronx_distributed.utils`: names that scripts import beside the documented API, from nxd_neuronx.

Submodules, some of which import the whole engine, are imported when they are first used.
"""

import importlib
from typing import Any

from nxd_neuronx.process import cpu_mode, hardware, mark_step, master_print
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

__all__ = ["cpu_mode", "get_device", "hardware", "mark_step", "master_print"]
__all__ += list(_SUBMODULES)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(__all__)}")
