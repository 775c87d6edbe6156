"""`neuronx_distributed.trace.nxd_model.utils`: what the old model kept of its programs."""

from nxd_neuronx.not_here import explains

__getattr__ = explains(__name__)
