"""`neuronx_distributed.modules.moe.model_utils`: activations of experts, and defaults of configurations."""

from nxd_neuronx.expert_configs import DEFAULT_BLOCK_SIZE, DEFAULT_LNC_SIZE, DEFAULT_SKIP_MODE, GLUType
from nxd_neuronx.experts import ACT2FN
from nxd_neuronx.unsupported import explains

__all__ = ["ACT2FN", "DEFAULT_BLOCK_SIZE", "DEFAULT_LNC_SIZE", "DEFAULT_SKIP_MODE", "GLUType"]
__getattr__ = explains(__name__)
