"""`neuronx_distributed.optimizer.zero_dcp_utils`: ZeRO-1 states separate from the model; use checkpoints."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
