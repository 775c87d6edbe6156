"""`neuronx_distributed.trace.model_builder_utils`: what the old builder kept of a trace."""

from nxd_neuronx.not_here import explains

__getattr__ = explains(__name__)
