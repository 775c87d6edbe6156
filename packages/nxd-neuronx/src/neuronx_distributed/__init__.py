"""The import paths of NeuronX Distributed, served by the nxd packages. Re-exports only: no logic lives here.

Submodules, and the training API of `neuronx_distributed.trainer`, are imported when they are first used, so that
`import neuronx_distributed` costs nothing.
"""

import importlib
from typing import Any

from nxd_neuronx.import_paths import warn_of_other_owner

_SUBMODULES = (
    "parallel_state",
    "parallel_layers",
    "modules",
    "kernels",
    "operators",
    "overrides",
    "optimizer",
    "pipeline",
    "quantization",
    "scripts",
    "trainer",
    "lightning",
    "utils",
    "trace",
)
_OF_TRAINER = (
    "neuronx_distributed_config",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "save_checkpoint",
    "load_checkpoint",
    "has_checkpoint",
    "finalize_checkpoint",
)
_ELSEWHERE = {
    "ModelBuilder": "trace.model_builder_v2",
    "shard_checkpoint": "trace.functions",
    "BaseNxDModel": "trace.nxd_model",
    "NxDModel": "trace.nxd_model",
    "NxDParallelState": "trace.parallel_context",
}

__all__ = list(_SUBMODULES + _OF_TRAINER + tuple(_ELSEWHERE))


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _OF_TRAINER:
        return getattr(importlib.import_module(f"{__name__}.trainer"), name)
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


warn_of_other_owner()
