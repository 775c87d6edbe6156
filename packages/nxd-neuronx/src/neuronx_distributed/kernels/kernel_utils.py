"""`neuronx_distributed.kernels.kernel_utils`: helpers around kernels, from nxd_neuronx."""

from nxd_neuronx.attention import permute
from nxd_neuronx.unsupported import explains

__all__ = ["permute"]
__getattr__ = explains(__name__)
