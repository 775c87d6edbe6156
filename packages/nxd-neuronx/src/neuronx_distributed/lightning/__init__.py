"""`neuronx_distributed.lightning`: PyTorch Lightning over a mesh, from nxd_lightning (`pip install nxd-lightning`)."""

from nxd_neuronx.import_paths import from_nxd_lightning

__all__ = [
    "NeuronLTModule",
    "NeuronXLAStrategy",
    "NeuronXLAPrecisionPlugin",
    "NeuronXLAAccelerator",
    "NeuronTQDMProgressBar",
    "NeuronTensorBoardLogger",
    "NeuronCheckpointIO",
    "NeuronHooksCallback",
]
__getattr__ = from_nxd_lightning(__name__, *__all__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
