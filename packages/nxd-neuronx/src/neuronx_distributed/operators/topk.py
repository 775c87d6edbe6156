"""`neuronx_distributed.operators.topk`: over ranks, by nxd_layers."""

from nxd_neuronx.not_here import not_here
from nxd_neuronx.operators import topk

(get_topk_implementation,) = not_here(__name__, "nki", "get_topk_implementation")

__all__ = ["topk", "get_topk_implementation"]
