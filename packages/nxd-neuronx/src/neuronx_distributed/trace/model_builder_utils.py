"""`neuronx_distributed.trace.model_builder_utils`: artifacts of the old builder."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
