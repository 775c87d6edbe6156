"""`neuronx_distributed.modules.moe.nki_import`: imports of kernels."""

from nxd_neuronx.not_here import explains

__getattr__ = explains(__name__)
