"""`neuronx_distributed.trace.functions`: sharding of checkpoints; `ModelBuilder` compiles models."""

from nxd_neuronx.not_here import explains
from nxd_neuronx.planned_ranks import shard_checkpoint

__all__ = ["shard_checkpoint"]
__getattr__ = explains(__name__)
