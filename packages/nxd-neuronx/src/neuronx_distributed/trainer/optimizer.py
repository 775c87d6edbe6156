"""`neuronx_distributed.trainer.optimizer`: the optimizer wrapper, from nxd_engine."""

from nxd_engine.optimizer import NxDOptimizer

__all__ = ["NxDOptimizer"]
