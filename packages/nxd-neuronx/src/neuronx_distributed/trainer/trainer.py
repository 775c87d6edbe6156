"""`neuronx_distributed.trainer.trainer`: the documented calls and their parts, from nxd_engine and nxd_neuronx."""

from nxd_engine import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config

__all__ = ["initialize_parallel_model", "initialize_parallel_optimizer", "neuronx_distributed_config"]
