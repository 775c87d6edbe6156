"""Gradient averaging, accumulation and exact clipping for data- and tensor-parallel training."""

from nxd_optim.clip import clip_grad_norm, grad_norm
from nxd_optim.reducer import GradientReducer
from nxd_optim.sequence_parallel import reduce_sequence_parallel_gradients

__version__ = "0.1.0"

__all__ = ["GradientReducer", "reduce_sequence_parallel_gradients", "grad_norm", "clip_grad_norm"]
