"""`neuronx_distributed.utils.sampling`: drawing tokens, from nxd_trainer."""

from nxd_trainer.compat.sampling import Sampler

__all__ = ["Sampler"]
