"""`neuronx_distributed.operators.argmax`: argmax over ranks, from nxd_neuronx."""

from nxd_neuronx.sampling import argmax

__all__ = ["argmax"]
