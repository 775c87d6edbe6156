"""PyTorch Lightning on the nxd packages: Trainer, callbacks, loggers and checkpoints with TP, PP and ZeRO.

Names are imported on first use. The Lightning package that they inherit from is chosen then, see `lightning_package`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxd_lightning.callbacks import NeuronHooksCallback, NeuronTensorBoardLogger, NeuronTQDMProgressBar
    from nxd_lightning.checkpoint_io import NeuronCheckpointIO
    from nxd_lightning.data import TextDataModule
    from nxd_lightning.lightning_package import NeuronXLAAccelerator
    from nxd_lightning.module import NeuronLTModule
    from nxd_lightning.precision import NeuronXLAPrecisionPlugin
    from nxd_lightning.strategy import NeuronXLAStrategy

__version__ = "0.1.0"

__all__ = [
    "NeuronLTModule",
    "NeuronXLAStrategy",
    "NeuronXLAPrecisionPlugin",
    "NeuronTQDMProgressBar",
    "NeuronTensorBoardLogger",
    "NeuronCheckpointIO",
    "NeuronHooksCallback",
    "NeuronXLAAccelerator",
    "TextDataModule",
]

_MODULES = {
    "NeuronLTModule": "module",
    "NeuronXLAStrategy": "strategy",
    "NeuronXLAPrecisionPlugin": "precision",
    "NeuronTQDMProgressBar": "callbacks",
    "NeuronTensorBoardLogger": "callbacks",
    "NeuronCheckpointIO": "checkpoint_io",
    "NeuronHooksCallback": "callbacks",
    "NeuronXLAAccelerator": "lightning_package",
    "TextDataModule": "data",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
