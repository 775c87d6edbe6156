"""`neuronx_distributed.utils.tensor_utils`: running sums, from nxd_neuronx."""

from nxd_neuronx.batches import cumsum

__all__ = ["cumsum"]
