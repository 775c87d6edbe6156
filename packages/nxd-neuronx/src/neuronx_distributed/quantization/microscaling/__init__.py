"""`neuronx_distributed.quantization.microscaling`: layouts of NKI kernels."""

from neuronx_distributed.quantization.microscaling import transform_weights

__all__ = ["transform_weights"]
