"""`neuronx_distributed.trainer.model`: the model wrapper, from nxd_trainer."""

from nxd_engine.model import NxDModel

__all__ = ["NxDModel"]
