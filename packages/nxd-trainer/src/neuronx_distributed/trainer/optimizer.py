"""`neuronx_distributed.trainer.optimizer`: the optimizer wrapper, from nxd_trainer."""

from nxd_trainer.api.optimizer import NxDOptimizer

__all__ = ["NxDOptimizer"]
