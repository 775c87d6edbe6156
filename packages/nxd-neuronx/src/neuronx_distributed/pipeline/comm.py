"""`neuronx_distributed.pipeline.comm`: the rank prefix of messages, from nxd_state."""

from nxd_state.mesh_getters import rmsg

__all__ = ["rmsg"]
