"""`neuronx_distributed.trace.model_builder_utils`: artifacts of the old builder."""

from nxd_neuronx.not_here import explains

__getattr__ = explains(__name__)
