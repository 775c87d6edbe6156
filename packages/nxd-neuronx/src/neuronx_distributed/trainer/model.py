"""`neuronx_distributed.trainer.model`: the model wrapper, from nxd_engine."""

from nxd_engine.nxd_model import NxDModel

__all__ = ["NxDModel"]
