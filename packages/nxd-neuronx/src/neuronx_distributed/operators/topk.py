"""`neuronx_distributed.operators.topk`: top-k over ranks, from nxd_neuronx."""

from nxd_neuronx.not_here import explains
from nxd_neuronx.sampling import topk

__all__ = ["topk"]
__getattr__ = explains(__name__)
