"""`neuronx_distributed.utils.batch_utils`: preparation of batches, from nxd_neuronx."""

from nxd_neuronx.attention import get_batch_on_this_context_parallel_rank, shift_labels

__all__ = ["get_batch_on_this_context_parallel_rank", "shift_labels"]
