"""`neuronx_distributed.optimizer.zero_dcp_utils`: ZeRO-1 states apart from the model; use checkpoints."""

from nxd_neuronx.not_here import explains

MAX_RETRY = 3  # of the old writer

__all__ = ["MAX_RETRY"]
__getattr__ = explains(__name__)
