"""`neuronx_distributed.quantization.microscaling`: microscaled weights."""

from neuronx_distributed.quantization.microscaling import transform_weights

__all__ = ["transform_weights"]
