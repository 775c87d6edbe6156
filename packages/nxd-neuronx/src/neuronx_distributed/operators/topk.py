"""`neuronx_distributed.operators.topk`: top-k over ranks, from nxd_neuronx."""

from nxd_neuronx.sampling import topk
from nxd_neuronx.unsupported import explains

__all__ = ["topk"]
__getattr__ = explains(__name__)
