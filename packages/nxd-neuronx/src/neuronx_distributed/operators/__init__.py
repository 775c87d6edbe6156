"""`neuronx_distributed.operators`: searches in tensors that are split over ranks."""

from neuronx_distributed.operators.argmax import argmax

__all__ = ["argmax"]
