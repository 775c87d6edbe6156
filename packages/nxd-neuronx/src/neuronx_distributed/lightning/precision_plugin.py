"""`neuronx_distributed.lightning.precision_plugin`: from nxd_lightning."""

from nxd_neuronx.import_paths import from_nxd_lightning

__getattr__ = from_nxd_lightning(__name__, "NeuronXLAPrecisionPlugin")
