"""`neuronx_distributed.trainer.post_partition_hooks`: hooks for later, from nxd_neuronx."""

from nxd_neuronx.optimizers import PostPartitionHooks

__all__ = ["PostPartitionHooks"]
