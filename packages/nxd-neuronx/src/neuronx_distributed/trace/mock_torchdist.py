"""`neuronx_distributed.trace.mock_torchdist`: ranks that are planned, by nxd_state."""

from nxd_neuronx.not_here import explains
from nxd_neuronx.planned_ranks import mock_distributed

__all__ = ["mock_distributed"]
__getattr__ = explains(__name__)
