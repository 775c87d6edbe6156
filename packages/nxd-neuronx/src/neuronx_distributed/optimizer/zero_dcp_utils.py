"""`neuronx_distributed.optimizer.zero_dcp_utils`: ZeRO-1 states separate from the model; use checkpoints."""

from nxd_neuronx.not_here import explains

__getattr__ = explains(__name__)
