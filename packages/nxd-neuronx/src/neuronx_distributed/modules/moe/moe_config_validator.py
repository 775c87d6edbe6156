"""`neuronx_distributed.modules.moe.moe_config_validator`: checks of configurations for kernels."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
