"""`neuronx_distributed.pipeline.comm`: the marks of ranks in messages, from nxd_state."""

from nxd_state.mesh_getters import rmsg

__all__ = ["rmsg"]
