"""`neuronx_distributed.trainer`: the documented training API, from nxd_engine."""

from nxd_engine import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config
from nxd_neuronx.unsupported import explains

from neuronx_distributed.trainer import checkpoint, model, optimizer, post_partition_hooks, trainer
from neuronx_distributed.trainer.checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
from neuronx_distributed.trainer.model import NxDModel
from neuronx_distributed.trainer.optimizer import NxDOptimizer

__all__ = [
    "neuronx_distributed_config",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "save_checkpoint",
    "load_checkpoint",
    "has_checkpoint",
    "finalize_checkpoint",
    "NxDModel",
    "NxDOptimizer",
    "checkpoint",
    "model",
    "optimizer",
    "post_partition_hooks",
    "trainer",
]
__getattr__ = explains(__name__)
