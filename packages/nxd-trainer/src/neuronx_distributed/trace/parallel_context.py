"""`neuronx_distributed.trace.parallel_context`: a block with a mesh, by nxd_state."""

from nxd_trainer.compat.tracing import NxDParallelState

__all__ = ["NxDParallelState"]
