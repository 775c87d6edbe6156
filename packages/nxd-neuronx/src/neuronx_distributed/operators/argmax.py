"""`neuronx_distributed.operators.argmax`: over ranks, by nxd_layers."""

from nxd_neuronx.sampling import argmax

__all__ = ["argmax"]
