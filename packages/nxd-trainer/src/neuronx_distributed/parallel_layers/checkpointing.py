"""`neuronx_distributed.parallel_layers.checkpointing`: files of each model-parallel rank, from nxd_trainer."""

from nxd_trainer.api.shard_files import load, save

__all__ = ["save", "load"]
