"""`neuronx_distributed.trace.parallel_context`: a context manager with a mesh, by nxd_state."""

from nxd_neuronx.planned_ranks import NxDParallelState

__all__ = ["NxDParallelState"]
