"""`neuronx_distributed.operators`: argmax and top-k of tensors that are split over ranks."""

from neuronx_distributed.operators.argmax import argmax

__all__ = ["argmax"]
