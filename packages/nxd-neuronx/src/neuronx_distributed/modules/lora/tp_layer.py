"""`neuronx_distributed.modules.lora.tp_layer`: parallel layers with adapters."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
