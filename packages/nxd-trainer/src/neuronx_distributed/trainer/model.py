"""`neuronx_distributed.trainer.model`: the model wrapper, from nxd_trainer."""

from nxd_trainer.api.model import NxDModel

__all__ = ["NxDModel"]
