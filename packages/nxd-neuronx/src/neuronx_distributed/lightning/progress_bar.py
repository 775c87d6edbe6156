"""`neuronx_distributed.lightning.progress_bar`: from nxd_lightning."""

from typing import Any

from nxd_neuronx.lightning_names import from_nxd_lightning

_NAMES = ("NeuronTQDMProgressBar",)


def __getattr__(name: str) -> Any:
    return from_nxd_lightning(__name__, name, _NAMES)
