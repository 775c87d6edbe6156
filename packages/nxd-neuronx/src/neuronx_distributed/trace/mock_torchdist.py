"""`neuronx_distributed.trace.mock_torchdist`: ranks that are planned, by nxd_state."""

from nxd_neuronx.not_here import not_here
from nxd_neuronx.planned_ranks import mock_distributed

(MockDistributed,) = not_here(__name__, "hlo", "MockDistributed")

__all__ = ["mock_distributed", "MockDistributed"]
