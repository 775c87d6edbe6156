"""`neuronx_distributed.lightning`: PyTorch Lightning over a mesh, from nxd_lightning (`pip install nxd-lightning`)."""

import importlib
from typing import Any

__all__ = [
    "NeuronLTModule",
    "NeuronXLAStrategy",
    "NeuronXLAPrecisionPlugin",
    "NeuronTQDMProgressBar",
    "NeuronTensorBoardLogger",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(__all__)}")
    try:
        nxd_lightning = importlib.import_module("nxd_lightning")
    except ModuleNotFoundError as error:
        if error.name != "nxd_lightning":
            raise
        raise ImportError(
            f"neuronx_distributed.lightning.{name} is in a package of its own; pip install nxd-lightning"
        ) from error
    return getattr(nxd_lightning, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
