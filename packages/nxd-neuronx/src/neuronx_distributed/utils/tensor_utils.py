"""`neuronx_distributed.utils.tensor_utils`: running sums, from nxd_trainer."""

from nxd_neuronx.batches import cumsum

__all__ = ["cumsum"]
