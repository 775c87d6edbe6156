"""`neuronx_distributed.trainer.post_partition_hooks`: hooks for later, from nxd_trainer."""

from nxd_neuronx.optimizers import PostPartitionHooks

__all__ = ["PostPartitionHooks"]
