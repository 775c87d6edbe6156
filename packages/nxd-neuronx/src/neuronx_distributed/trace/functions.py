"""`neuronx_distributed.trace.functions`: sharding of checkpoints; `ModelBuilder` compiles models."""

from nxd_neuronx.planned_ranks import shard_checkpoint
from nxd_neuronx.unsupported import explains

__all__ = ["shard_checkpoint"]
__getattr__ = explains(__name__)
