"""`neuronx_distributed.trace.hlo_utils`: HLO programs, which do not exist here."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
