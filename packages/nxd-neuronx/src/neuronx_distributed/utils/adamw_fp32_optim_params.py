"""`neuronx_distributed.utils.adamw_fp32_optim_params`: AdamW with float32 moments, from nxd_neuronx."""

from nxd_neuronx.optimizer import AdamW_FP32OptimParams

__all__ = ["AdamW_FP32OptimParams"]
