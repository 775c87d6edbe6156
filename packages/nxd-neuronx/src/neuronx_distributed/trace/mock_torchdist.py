"""`neuronx_distributed.trace.mock_torchdist`: planned ranks, by nxd_state."""

from nxd_neuronx.planned_ranks import mock_distributed

__all__ = ["mock_distributed"]
