"""`neuronx_distributed.modules.lora.layer`: single layers with adapters."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
