"""`neuronx_distributed.trace.spmd`: compiled models, over nxd_trace."""

from nxd_neuronx.not_here import not_here
from nxd_neuronx.traced_model import NxDModel, NxDModelExecutor

(SPMDBucketModelScript, StateInitializer, default_bucket_kernel) = not_here(
    __name__, "hlo", "SPMDBucketModelScript", "StateInitializer", "default_bucket_kernel"
)

__all__ = ["NxDModel", "NxDModelExecutor", "SPMDBucketModelScript", "StateInitializer", "default_bucket_kernel"]
