"""`neuronx_distributed.utils.random`: seeding, from nxd_neuronx."""

from nxd_neuronx.process import set_random_seed

__all__ = ["set_random_seed"]
