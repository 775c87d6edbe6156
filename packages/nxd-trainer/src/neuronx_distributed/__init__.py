"""The import paths of NeuronX Distributed, served by the nxd packages. Re-exports only: no logic lives here.

Submodules are imported when they are first used, so that `import neuronx_distributed` costs nothing.
"""

import importlib
from types import ModuleType

_SUBMODULES = ("parallel_state", "parallel_layers", "modules", "optimizer", "pipeline")

__all__ = list(_SUBMODULES)


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(_SUBMODULES)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES])
