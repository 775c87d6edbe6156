"""`neuronx_distributed.modules.moe.nki_import`: imports of kernels."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
