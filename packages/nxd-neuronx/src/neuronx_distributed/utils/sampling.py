"""`neuronx_distributed.utils.sampling`: sampling of tokens, from nxd_neuronx."""

from nxd_neuronx.sampling import Sampler

__all__ = ["Sampler"]
